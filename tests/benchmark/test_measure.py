"""Running workloads: what is timed, what is counted, and what is no result."""

import time

import pytest

from octavo.assembly import build_engine
from octavo.attention_backends.torch_sdpa import TorchSDPABackend
from octavo.benchmark.measure import Measurement, NotRun, Percentiles, Run, measure, percentiles, run_once, warm_up
from octavo.benchmark.workloads import Workload, custom_workload, named_workload
from octavo.config import EngineConfig
from octavo.core.sampling_params import SamplingParams
from octavo.engine_thread import EngineThread, Mailbox
from octavo.errors import EngineBusyError, StepError
from octavo.prompts import ParsedPrompt
from octavo.testing import installed, tiny_models

STEP_SECONDS = 0.02


class SlowBackend(TorchSDPABackend):
    """Right, and every step of it takes a while."""

    contract_version = 1

    def plan(self, batch):
        time.sleep(STEP_SECONDS)
        return super().plan(batch)


class NanBackend(TorchSDPABackend):
    """What it returns is no number once a request has more than 40 tokens."""

    contract_version = 1

    def plan(self, batch):
        self.is_long = max(batch.context_lens_host) > 40
        return super().plan(batch)

    def attend(self, query, kv_cache, plan, **more):
        output = super().attend(query, kv_cache, plan, **more)
        return output * float("nan") if self.is_long else output


class FailingBackend(TorchSDPABackend):
    contract_version = 1

    def plan(self, batch):
        raise RuntimeError("out of order")


BACKENDS = {"slow": SlowBackend, "nan": NanBackend, "failing": FailingBackend}


@pytest.fixture
def make_thread(tiny_folder):
    """Makes an engine in its thread; settings as for an LLM."""
    threads = []

    def make(model=tiny_folder, **settings):
        config = EngineConfig.from_flat(model=str(model), **({"num_kv_blocks": 64} | settings))
        threads.append(EngineThread(lambda: build_engine(config)))
        return threads[-1]

    with installed({"octavo.attention_backends": BACKENDS}):
        yield make
    for thread in threads:
        thread.stop()


def work(num_prompts, input_len, output_len, seed=0):
    return custom_workload(num_prompts, input_len, output_len, vocab_size=512, seed=seed)


def test_the_first_token_counts_from_the_arrival_and_later_ones_from_the_one_before(make_thread):
    thread = make_thread(attention_backend="slow", max_num_batched_tokens=16)
    run = run_once(thread, work(1, 64, 5))
    assert run.steps == 8
    (first,), (each,) = run.first_token_seconds, run.token_seconds
    # Four steps for the prompt, the last of which brings a token, and four more.
    assert first >= 4 * STEP_SECONDS
    assert each >= STEP_SECONDS
    assert first + 4 * each <= run.seconds
    assert run.seconds - (first + 4 * each) < STEP_SECONDS


def test_a_request_that_waits_for_its_turn_has_its_first_token_late(make_thread):
    thread = make_thread(attention_backend="slow", max_num_seqs=1)
    run = run_once(thread, work(2, 8, 3))
    early, late = run.first_token_seconds
    assert late - early >= 3 * STEP_SECONDS
    assert run.seconds >= 6 * STEP_SECONDS


def test_a_single_token_has_no_time_per_token(make_thread):
    run = run_once(make_thread(), work(3, 8, 1))
    assert len(run.first_token_seconds) == 3
    assert run.token_seconds == []


def test_the_prefix_cache_is_empty_at_the_start_of_each_run_and_hits_within_it_count(make_thread):
    thread = make_thread(max_num_seqs=1)
    shared = list(range(3, 35))
    measured = measure(thread, Workload("shared", ([*shared, 40], [*shared, 41], [*shared, 42]), 2), 3)
    assert isinstance(measured, Measurement)
    assert [run.hit_tokens for run in measured.runs] == [64, 64, 64]
    assert measured.hit_tokens == 64


def test_preemptions_count(make_thread):
    thread = make_thread(num_kv_blocks=6, enable_prefix_caching=False)
    measured = measure(thread, work(2, 16, 48), 2)
    assert isinstance(measured, Measurement)
    assert measured.preemptions > 0
    assert [run.preemptions for run in measured.runs] == [measured.preemptions] * 2
    assert all(run.recomputed_tokens > 0 for run in measured.runs)


def test_each_run_is_told_when_it_is_done(make_thread):
    told = []
    measured = measure(make_thread(), work(1, 4, 2), 3, on_run=told.append)
    assert isinstance(measured, Measurement)
    assert tuple(told) == measured.runs


def test_rates_are_of_the_median_run():
    runs = tuple(Run(seconds, [0.1 * seconds], [0.5], 0, 0, 0, 2) for seconds in (4.0, 1.0, 2.0))
    measured = Measurement(Workload("one", ([1, 2, 3], [4]), 5), runs)
    assert measured.seconds == 2.0
    assert measured.requests_per_s == 1.0
    assert measured.prompt_tokens_per_s == 2.0
    assert measured.output_tokens_per_s == 5.0
    assert measured.first_token_seconds == Percentiles(0.2, 0.4)


@pytest.mark.parametrize(
    ("values", "median", "p99"),
    [
        ([], None, None),
        ([3.0], 3.0, 3.0),
        ([2.0, 1.0], 1.5, 2.0),
        (range(1, 100), 50, 99),
        (range(1, 101), 50.5, 99),
        (range(1, 201), 100.5, 198),
        (reversed(range(1, 201)), 100.5, 198),
    ],
)
def test_percentiles_are_the_median_and_what_99_of_100_do_not_exceed(values, median, p99):
    assert percentiles(list(values)) == Percentiles(median, p99)


def test_the_warm_up_is_one_token_of_a_prompt_of_40_or_what_fits(make_thread):
    thread = make_thread()
    warm_up(thread)
    assert (thread.assembly.engine.stats().queried_tokens, thread.assembly.engine.stats().steps) == (40, 1)
    short = make_thread(max_model_len=8)
    warm_up(short)
    assert short.assembly.engine.stats().queried_tokens == 7


def test_a_model_without_a_tokenizer_can_be_measured(make_thread, tmp_path, caplog):
    thread = make_thread(tiny_models.tiny_llama(tmp_path))
    assert isinstance(run_once(thread, work(1, 4, 2)), Run)


# -- what is no result --------------------------------------------------------------------------------------------


def test_ids_above_the_vocabulary_are_a_reason_not_to_run(make_thread):
    outcome = measure(make_thread(), named_workload("single"), 3)
    assert outcome == NotRun(
        named_workload("single"),
        "Token id 25347 at position 0 of the prompt is not in the vocabulary; ids are whole numbers from 0 to 511",
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_model_len": 71}, "max_model_len is 71; set it to 72 or more, or leave it out"),
        (
            {"num_kv_blocks": 4},
            "max_model_len is 48, as long as the KV cache of 4 blocks allows; give it 6 blocks (num_kv_blocks) or "
            "49152 bytes (kv_cache_memory_bytes) or more",
        ),
        (
            {"num_kv_blocks": 4, "max_model_len": 50},
            "max_model_len is 50; set it to 72 or leave it out, and as the KV cache of 4 blocks holds requests of up "
            "to 48 tokens, give it 6 blocks (num_kv_blocks) or 49152 bytes (kv_cache_memory_bytes) or more",
        ),
    ],
    ids=["max_model_len", "blocks", "both"],
)
def test_a_request_longer_than_the_engine_serves_is_a_reason_not_to_run(make_thread, settings, reason):
    outcome = measure(make_thread(**settings), work(2, 32, 40), 3)
    assert isinstance(outcome, NotRun)
    assert outcome.reason == f"its longest request takes 72 tokens, and {reason}"


@pytest.mark.parametrize(
    "settings",
    [{"max_model_len": 72}, {"num_kv_blocks": 6}, {"num_kv_blocks": None, "kv_cache_memory_bytes": 49152}],
    ids=str,
)
def test_what_is_said_to_do_does(make_thread, settings):
    assert isinstance(measure(make_thread(**settings), work(2, 32, 40), 1), Measurement)


def test_a_request_longer_than_the_models_positions_is_a_reason_not_to_run(make_thread):
    outcome = measure(make_thread(), work(1, 500, 13), 3)
    assert isinstance(outcome, NotRun)
    assert outcome.reason == (
        "its longest request takes 513 tokens, and max_model_len is 512; this model's positions go up to 512"
    )


def test_an_answer_that_breaks_off_is_no_result(make_thread):
    outcome = measure(make_thread(attention_backend="nan"), work(1, 38, 8), 3)
    assert isinstance(outcome, NotRun)
    assert outcome.reason == "request-0 ended after 3 of 8 tokens (non_finite_logits)"


def test_a_step_that_fails_is_raised_and_nothing_is_left_under_way(make_thread):
    thread = make_thread(attention_backend="failing")
    with pytest.raises(StepError):
        measure(thread, work(2, 8, 4), 1)
    stats = thread.call(thread.assembly.engine.stats)
    assert (stats.running, stats.waiting) == (0, 0)


def test_an_engine_that_others_use_is_not_measured(make_thread):
    thread = make_thread(attention_backend="slow")
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    mailbox = Mailbox([ParsedPrompt(None, [5] * 8)], [params], wants_updates=True)
    thread.submit(mailbox)
    mailbox.next_news()
    try:
        with pytest.raises(EngineBusyError, match=r"^The prefix cache cannot be emptied before a run: "):
            run_once(thread, work(1, 4, 2))
    finally:
        thread.close(mailbox)
