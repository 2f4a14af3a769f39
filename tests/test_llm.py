"""The blocking Python API: what callers pass, what they get, and what is left when they go."""

import _thread
import gc
import random
import signal
import subprocess
import sys
import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from octavo import LLM, EngineConfig, SamplingParams
from octavo.attention_backends.torch_sdpa import TorchSDPABackend
from octavo.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    PluginBroken,
    PluginContractError,
    StepError,
)
from octavo.request_queues import FCFSQueue
from octavo.testing import installed

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def llm(make_llm, tiny_folder):
    return make_llm(tiny_folder, num_kv_blocks=200)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


# -- prompts in, results out ------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = ["one", "two two two", "three"]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == prompts
    assert all(output.finished for output in together)
    assert ids(together) == ids(llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts)


def test_text_is_the_decoded_tokens(llm):
    (output,) = llm.generate("one", GREEDY, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert output.prompt_token_ids == tokenizer.encode("one")
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)


def test_text_ids_and_dicts_are_the_same_prompt(llm):
    token_ids = llm.get_tokenizer().encode("one")
    forms = ["one", token_ids, {"prompt": "one"}, {"prompt_token_ids": token_ids}]
    assert len({tuple(answer) for answer in ids(llm.generate(forms, GREEDY, use_tqdm=False))}) == 1
    assert ids(llm.generate(token_ids, GREEDY, use_tqdm=False)) == ids(llm.generate("one", GREEDY, use_tqdm=False))


def test_no_prompts_give_no_results(llm):
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_each_prompt_can_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 5, 3)]
    assert [len(answer) for answer in ids(llm.generate(["a", "b", "c"], params, use_tqdm=False))] == [1, 5, 3]
    for wrong in ({"temperature": 0}, 5, ["greedy"]):
        with pytest.raises(InvalidRequestError, match="sampling_params must be a SamplingParams, or a list"):
            llm.generate("a", wrong, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="2 prompts and 3 SamplingParams"):
        llm.generate(["a", "b"], params, use_tqdm=False)


def test_two_calls_with_lists_of_different_length_do_not_mix(llm):
    first = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    second = llm.generate(["d", "a"], GREEDY, use_tqdm=False)
    assert len({output.request_id for output in first + second}) == 5
    assert ids(second)[1] == ids(first)[0]


def test_callers_ids_come_back_and_can_be_used_again(llm):
    prompt = {"prompt": "one", "request_id": "mine"}
    for _ in range(2):
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.request_id == "mine"


def test_made_up_ids_avoid_those_of_the_caller(llm):
    prompts = ["a", {"prompt": "b", "request_id": "request-0"}, "c"]
    request_ids = [output.request_id for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert request_ids[1] == "request-0"
    assert len(set(request_ids)) == 3


def test_salted_prompts_share_with_their_like_only(llm):
    prompt = "a prompt that is longer than two blocks of sixteen"
    hits = []
    for salt in ("a", "a", "b", None):
        extras = {} if salt is None else {"cache_salt": salt}
        (output,) = llm.generate({"prompt": prompt, **extras}, GREEDY, use_tqdm=False)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 48, 0, 0]


def test_a_conversation_is_rendered_by_the_models_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == "user: hiassistant: "
    assert llm.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False) == (
        "<s>user: hi</s><s>assistant: "
    )
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert ids(two) == ids([output, output])


# -- streaming --------------------------------------------------------------------------------------------------


def test_a_stream_adds_up_to_what_generate_returns(llm):
    params = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)
    pieces = list(llm.stream("one", params))
    assert len(pieces) > 5
    assert "".join(pieces) == texts(llm.generate("one", params, use_tqdm=False))[0]


def test_a_stream_that_is_left_early_ends_its_request(llm):
    stream = llm.stream("one", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    next(stream)
    assert llm.stats().running == 1
    stream.close()
    assert llm.stats().running == 0
    assert llm.stats().used_blocks == 0


def test_a_stream_and_a_generate_can_run_side_by_side_in_one_thread(llm):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    alone = "".join(llm.stream("one", params))
    stream = llm.stream("one", params)
    pieces = [next(stream)]
    llm.generate(["two", "three"], GREEDY, use_tqdm=False)
    assert "".join([*pieces, *stream]) == alone


def test_a_stream_has_the_whole_result_once_its_text_has_come_to_an_end(llm):
    stream = llm.stream("one", GREEDY)
    assert stream.output is None
    next(stream)
    assert stream.output is None
    list(stream)
    (expected,) = llm.generate("one", GREEDY, use_tqdm=False)
    assert stream.output.outputs == expected.outputs
    assert stream.output.finished


def test_a_stream_that_is_left_early_has_no_result(llm):
    stream = llm.stream("one", GREEDY)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert stream.output is None


def test_what_is_wrong_with_a_stream_is_said_by_the_call_itself(llm):
    with pytest.raises(InvalidRequestError, match="n is 2"):
        llm.stream("one", SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        llm.stream("")
    with pytest.raises(InvalidRequestError, match="not in the vocabulary"):
        llm.stream([5, 512])
    with pytest.raises(InvalidRequestError, match="must be one SamplingParams"):
        llm.stream("one", [GREEDY])
    with pytest.raises(InvalidRequestError, match="A stream takes one prompt"):
        llm.stream(["one", "two"], GREEDY)
    with pytest.raises(InvalidRequestError, match="A stream carries text"):
        llm.stream("one", SamplingParams(detokenize=False))
    stream = llm.stream({"prompt": "one", "request_id": "x"}, GREEDY)
    with pytest.raises(InvalidRequestError, match="The request id 'x' is in use"):
        llm.stream({"prompt": "one", "request_id": "x"}, GREEDY)
    stream.close()


@pytest.mark.parametrize("messages", [5, [], "hello", {"role": "user", "content": "x"}, [[]], iter([]), ["x"], [5]])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(InvalidRequestError):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_made_up_ids_do_not_collide_with_choices_of_others(llm):
    stream = llm.stream({"prompt": "one", "request_id": "request-0#1"}, GREEDY)
    (output,) = llm.generate("two", SamplingParams(n=2, max_tokens=2), use_tqdm=False)
    assert len(output.outputs) == 2
    stream.close()


# -- stopping ---------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_text_before_it_and_shows_none_of_it(llm):
    params = SamplingParams(temperature=1, seed=5, max_tokens=60, ignore_eos=True)
    whole = texts(llm.generate("one", params, use_tqdm=False))[0]
    stop = whole[20:27]
    wanted = whole[: whole.index(stop)]
    stopping = SamplingParams(temperature=1, seed=5, max_tokens=60, ignore_eos=True, stop=[stop, "never there"])
    (output,) = llm.generate("one", stopping, use_tqdm=False)
    assert output.outputs[0].text == wanted
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert "".join(llm.stream("one", stopping)) == wanted
    including = SamplingParams(
        temperature=1, seed=5, max_tokens=60, ignore_eos=True, stop=stop, include_stop_str_in_output=True
    )
    assert texts(llm.generate("one", including, use_tqdm=False))[0] == wanted + stop


def test_nothing_ends_a_request_before_min_tokens(llm):
    (free,) = ids(llm.generate("one", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False))
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=free[:3])
    assert len(ids(llm.generate("one", params, use_tqdm=False))[0]) == 1
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=free[:3], min_tokens=5)
    (held,) = ids(llm.generate("one", params, use_tqdm=False))
    assert len(held) >= 5
    assert not set(held[:5]) & set(free[:3])


def test_without_detokenizing_there_are_ids_and_no_text(llm):
    (output,) = llm.generate("one", SamplingParams(temperature=0, max_tokens=4, detokenize=False), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].text == ""


# -- seeds and choices ------------------------------------------------------------------------------------------


def test_four_choices_of_one_seed_differ_and_repeat_in_order(llm):
    params = SamplingParams(n=4, seed=7, temperature=1, max_tokens=12)
    first, second = (llm.generate("one", params, use_tqdm=False)[0] for _ in range(2))
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 4
    assert [choice.token_ids for choice in first.outputs] == [choice.token_ids for choice in second.outputs]


def test_a_seeded_request_gives_the_same_tokens_alone_in_company_cut_up_and_preempted(make_llm, tiny_folder, llm):
    seeded = SamplingParams(seed=11, temperature=0.9, top_p=0.95, max_tokens=40, ignore_eos=True)
    (alone,) = ids(llm.generate("the one with a seed", seeded, use_tqdm=False))
    others = [SamplingParams(temperature=1, max_tokens=40, ignore_eos=True)] * 7
    prompts = [*(f"number {i}" for i in range(7)), "the one with a seed"]
    assert ids(llm.generate(prompts, [*others, seeded], use_tqdm=False))[-1] == alone

    cut = make_llm(tiny_folder, num_kv_blocks=200, max_num_batched_tokens=5)
    assert ids(cut.generate(prompts, [*others, seeded], use_tqdm=False))[-1] == alone

    small = make_llm(tiny_folder, num_kv_blocks=25, block_size=4, max_model_len=96)
    outputs = small.generate(prompts[-3:], [*others[:2], seeded], use_tqdm=False)
    assert outputs[-1].num_preemptions > 0
    assert ids(outputs)[-1] == alone


def test_requests_without_a_seed_differ_from_each_other_and_repeat_with_the_engine(make_llm, tiny_folder):
    params = SamplingParams(temperature=1, max_tokens=12)
    runs = []
    for _ in range(2):
        engine = make_llm(tiny_folder, num_kv_blocks=50)
        runs.append(ids(engine.generate(["one", "one"], params, use_tqdm=False)))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    other = make_llm(tiny_folder, num_kv_blocks=50, seed=1)
    assert ids(other.generate(["one", "one"], params, use_tqdm=False)) != runs[0]


def test_the_global_random_state_and_signal_handlers_stay_as_they_were(make_llm, tiny_folder):
    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    engine = make_llm(tiny_folder, num_kv_blocks=50)
    engine.generate("one", SamplingParams(temperature=1, n=2), use_tqdm=False)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert {name: signal.getsignal(name) for name in handlers} == handlers


# -- faults -----------------------------------------------------------------------------------------------------


def test_a_wrong_prompt_in_a_list_is_named_and_nothing_of_the_list_runs(llm):
    with pytest.raises(InvalidRequestError, match="Prompt 1 of 3: The prompt is empty"):
        llm.generate(["one", "", "three"], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="Prompt 2 of 3: Token id 512 at position 1") as caught:
        llm.generate(["one", "two", [5, 512]], GREEDY, use_tqdm=False)
    assert caught.value.parameter == "prompt_token_ids"
    assert llm.stats().waiting == 0
    assert llm.stats().steps == 0


def test_a_wrong_prompt_does_not_shift_the_seeds_of_later_ones(make_llm, tiny_folder):
    params = SamplingParams(temperature=1, max_tokens=8)
    clean, disturbed = (make_llm(tiny_folder, num_kv_blocks=50) for _ in range(2))
    with pytest.raises(InvalidRequestError):
        disturbed.generate(["one", []], params, use_tqdm=False)
    assert ids(clean.generate("one", params, use_tqdm=False)) == ids(disturbed.generate("one", params, use_tqdm=False))


def test_one_id_twice_in_a_list_is_refused_and_leaves_nothing(llm):
    twice = [{"prompt": "a", "request_id": "x"}, {"prompt": "b", "request_id": "x"}]
    with pytest.raises(InvalidRequestError, match="Prompt 1 of 2: The request id 'x' is in use"):
        llm.generate(twice, GREEDY, use_tqdm=False)


def test_a_step_that_fails_is_raised_and_the_engine_goes_on_afterwards(llm, monkeypatch):
    (expected,) = ids(llm.generate("one, two, three, four, five", GREEDY, use_tqdm=False))
    llm.reset_prefix_cache()

    from octavo.attention_backends.torch_sdpa import TorchSDPABackend

    def broken(*args, **kwargs):
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(TorchSDPABackend, "attend", broken)
        with pytest.raises(StepError, match="RuntimeError: a kernel failed"):
            llm.generate("one, two, three, four, five", GREEDY, use_tqdm=False)
    (output,) = llm.generate("one, two, three, four, five", GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == expected


def test_a_request_whose_logits_are_not_finite_ends_with_an_error_and_its_neighbour_does_not_notice(llm, monkeypatch):
    (expected,) = ids(llm.generate("good", GREEDY, use_tqdm=False))

    from octavo.models.llama import LlamaModel

    logits = LlamaModel.logits

    def with_a_bad_row(self, hidden):
        scores = logits(self, hidden)
        scores[0, 7] = float("nan")
        return scores

    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "logits", with_a_bad_row)
        bad, _ = llm.generate(["a bad one", "good"], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", "non_finite_logits")
    assert bad.finished
    assert ids(llm.generate("good", GREEDY, use_tqdm=False)) == [expected]


def test_a_step_that_fails_ends_the_call_that_came_last_and_the_others_go_on(llm, monkeypatch):
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = "".join(llm.stream("one", long))
    stream = llm.stream("one", long)
    pieces = [next(stream)]

    from octavo.models.llama import LlamaModel

    forward = LlamaModel.forward

    def failing_on_a_token(self, batch):
        if (batch.token_ids == 500).any():
            raise RuntimeError("token 500 is bad luck")
        return forward(self, batch)

    monkeypatch.setattr(LlamaModel, "forward", failing_on_a_token)
    with pytest.raises(StepError, match="bad luck"):
        llm.generate([3, 500, 3], GREEDY, use_tqdm=False)
    assert "".join([*pieces, *stream]) == expected


class FailingBackend(TorchSDPABackend):
    """Goes wrong in one of its methods while a request of exactly 3 tokens is in the step."""

    contract_version = 1
    failing = "attend"
    answer = staticmethod(lambda output: output)

    def plan(self, batch):
        self.is_bad = 3 in batch.context_lens_host
        if self.is_bad and self.failing == "plan":
            raise OSError("no plan")
        return super().plan(batch)

    def write(self, key, value, kv_cache, slots):
        if self.is_bad and self.failing == "write":
            raise OSError("no room")
        super().write(key, value, kv_cache, slots)

    def attend(self, query, kv_cache, plan, **more):
        output = super().attend(query, kv_cache, plan, **more)
        if self.is_bad and self.failing == "attend":
            return self.answer(output)
        return output


def reshaped(output):
    return output.flatten(1)


def failing_to_attend(output):
    raise OSError("")


IN_LAYER_0 = "(in the attention backend test_llm.FailingBackend, layer 0)"


@pytest.mark.parametrize(
    ("failing", "answer", "sentence"),
    [
        ("plan", None, "OSError: no plan (in the attention backend test_llm.FailingBackend, planning)"),
        ("write", None, f"OSError: no room {IN_LAYER_0}"),
        ("attend", failing_to_attend, f"OSError {IN_LAYER_0}"),
        (
            "attend",
            lambda output: None,
            f"TypeError: attend returned NoneType; it must return torch.float32 (4, 4, 16) {IN_LAYER_0}",
        ),
        (
            "attend",
            reshaped,
            "TypeError: attend returned torch.float32 (4, 64); it must return torch.float32 (4, 4, 16) " + IN_LAYER_0,
        ),
        (
            "attend",
            torch.Tensor.double,
            "TypeError: attend returned torch.float64 (4, 4, 16); it must return torch.float32 (4, 4, 16) "
            + IN_LAYER_0,
        ),
    ],
)
def test_a_step_that_fails_in_a_backend_names_it_and_the_layer_and_other_requests_go_on(
    make_llm, tiny_folder, monkeypatch, failing, answer, sentence
):
    monkeypatch.setattr(FailingBackend, "failing", failing)
    monkeypatch.setattr(FailingBackend, "answer", staticmethod(answer))
    with installed({"octavo.attention_backends": {"failing": FailingBackend}}):
        llm = make_llm(tiny_folder, num_kv_blocks=200, attention_backend="failing")
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = "".join(llm.stream("a prompt", long))
    stream = llm.stream("a prompt", long)
    pieces = [next(stream)]
    with pytest.raises(StepError) as caught:
        llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    assert str(caught.value) == f"A step of 4 tokens failed and was undone: {sentence}"
    assert "".join([*pieces, *stream]) == expected


def test_an_answer_whose_text_cannot_be_made_ends_alone(llm, monkeypatch):
    (expected,) = texts(llm.generate("good", GREEDY, use_tqdm=False))

    from octavo.models.tokenizer import TextTokenizer

    decode = TextTokenizer.decode
    (bad_ids,) = ids(llm.generate("bad", GREEDY, use_tqdm=False))

    def failing_on_an_id(self, token_ids, **options):
        if bad_ids[2] in list(token_ids):
            raise RuntimeError("no such text")
        return decode(self, token_ids, **options)

    monkeypatch.setattr(TextTokenizer, "decode", failing_on_an_id)
    bad, good = llm.generate(["bad", "good"], GREEDY, use_tqdm=False)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", "detokenizer_failed")
    assert texts([good]) == [expected]


def test_an_interrupt_leaves_no_request_behind_and_others_do_not_notice(llm):
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    expected = "".join(llm.stream("one", long))
    stream = llm.stream("one", long)
    pieces = [next(stream)]
    interrupts = 0
    for delay_ms in range(12):
        timer = threading.Timer(delay_ms / 1000, _thread.interrupt_main)
        try:
            timer.start()
            llm.generate([f"number {i}" for i in range(20)], long, use_tqdm=False)
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            interrupts += 1
        timer.join()
    assert interrupts == 12
    assert "".join([*pieces, *stream]) == expected
    assert len(llm.generate("one", GREEDY, use_tqdm=False)) == 1


def test_streams_that_the_garbage_collector_closes_in_the_middle_of_a_step_do_no_harm(llm):
    (expected,) = ids(llm.generate("one, two, three", GREEDY, use_tqdm=False))
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    threshold = gc.get_threshold()
    # The collector runs at nearly every allocation, whatever line that is on.
    gc.set_threshold(5)
    try:
        for number in range(30):
            stream = llm.stream(f"dropped number {number}", long)
            next(stream)
            cycle = [stream]
            cycle.append(cycle)
            del stream, cycle
            assert ids(llm.generate("one, two, three", GREEDY, use_tqdm=False)) == [expected]
    finally:
        gc.set_threshold(*threshold)
    gc.collect()


def test_a_fault_of_the_engine_itself_is_said_to_everybody_and_nobody_hangs(tiny_folder, monkeypatch):
    from octavo.core.scheduler import Scheduler

    llm = LLM(tiny_folder, num_kv_blocks=50)
    stream = llm.stream("one", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)

    def broken(self, plan, result):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Scheduler, "update_from_output", broken)
    with pytest.raises(EngineClosedError, match="has died of a fault: ZeroDivisionError: a bug"):
        list(stream)
    with pytest.raises(EngineClosedError, match="has died"):
        llm.generate("two", GREEDY, use_tqdm=False)
    llm.shutdown()


class LosingQueue(FCFSQueue):
    """Loses the second request that it is given."""

    contract_version = 1
    num_added = 0

    def add_request(self, request):
        self.num_added += 1
        if self.num_added != 2:
            super().add_request(request)


class DenyingQueue(FCFSQueue):
    """Says that nobody waits."""

    contract_version = 1

    def __len__(self):
        return 0


class LastOutQueue(FCFSQueue):
    """Shows the first, and takes out the last."""

    contract_version = 1

    def pop_request(self):
        last = list(self)[-1]
        self.remove_request(last)
        return last


def test_a_queue_that_hands_out_another_request_ends_the_engine_with_a_sentence_and_no_caller_hangs(tiny_folder):
    with installed({"octavo.request_queues": {"lying": LastOutQueue}}):
        llm = LLM(tiny_folder, num_kv_blocks=50, request_queue="lying")
    errors: SimpleQueue[Exception] = SimpleQueue()

    def ask():
        prompts = [{"prompt": "1", "request_id": "one"}, {"prompt": "2", "request_id": "two"}]
        try:
            llm.generate(prompts, GREEDY, use_tqdm=False)
        except Exception as error:
            errors.put(error)

    threading.Thread(target=ask, daemon=True).start()
    error = errors.get(timeout=60)
    sentence = (
        "The request queue LastOutQueue showed 'one' with peek_request, and pop_request took out 'two'; the two must "
        "be the same."
    )
    assert isinstance(error, EngineClosedError)
    assert str(error) == f"The engine has died of a fault: PluginContractError: {sentence} Make a new one."
    assert isinstance(error.__cause__, PluginContractError)
    assert str(error.__cause__) == sentence
    with pytest.raises(EngineClosedError):
        llm.generate("three", GREEDY, use_tqdm=False)
    llm.shutdown()


@pytest.mark.parametrize(
    ("queue", "endings"),
    [
        (LosingQueue, [("length", None), ("error", "lost"), ("length", None)]),
        (DenyingQueue, [("error", "stuck")] * 3),
    ],
)
def test_a_queue_that_keeps_requests_back_costs_those_requests_and_no_caller_hangs(tiny_folder, queue, endings, caplog):
    with installed({"octavo.request_queues": {"lying": queue}}):
        llm = LLM(tiny_folder, num_kv_blocks=50, request_queue="lying")
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = llm.generate(["one", "two", "three"], long, use_tqdm=False)
    assert [(o.outputs[0].finish_reason, o.outputs[0].stop_reason) for o in outputs] == endings
    assert [len(o.outputs[0].token_ids) for o in outputs] == [100 if e[0] == "length" else 0 for e in endings]
    assert queue.__name__ in caplog.text
    llm.shutdown()


def test_planning_ahead_changes_no_answer(make_llm, tiny_folder):
    prompts = ["one", "two, three", "four five six seven", "one, two and three"]
    params = SamplingParams(temperature=0, max_tokens=40)
    answers = []
    for async_scheduling in (False, True):
        # So few blocks that requests are preempted.
        with make_llm(tiny_folder, num_kv_blocks=12, block_size=8, async_scheduling=async_scheduling) as llm:
            answers.append(ids(llm.generate(prompts, params, use_tqdm=False)))
            assert llm.stats().preemptions > 0
    assert answers[0] == answers[1]


def test_output_of_others_goes_where_it_went_while_a_progress_bar_is_shown(llm, capsys):
    stop = threading.Event()

    def chatter():
        while not stop.is_set():
            print("another thread")
            time.sleep(0.001)

    thread = threading.Thread(target=chatter)
    thread.start()
    try:
        llm.generate(["one", "two"], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    finally:
        stop.set()
        thread.join()
    shown = capsys.readouterr()
    assert "another thread" in shown.out
    assert "another thread" not in shown.err


# -- life -------------------------------------------------------------------------------------------------------


def test_shutting_down_twice_is_fine_and_using_it_afterwards_is_not(make_llm, tiny_folder):
    with make_llm(tiny_folder, num_kv_blocks=50) as llm:
        llm.generate("one", GREEDY, use_tqdm=False)
    llm.shutdown()
    for call in (
        lambda: llm.generate("one", GREEDY, use_tqdm=False),
        lambda: llm.stream("one", GREEDY),
        llm.stats,
        llm.reset_prefix_cache,
    ):
        with pytest.raises(EngineClosedError, match="This LLM was shut down; make a new one"):
            call()


def test_a_stream_under_way_when_the_engine_shuts_down_says_so_and_leaves_nothing(make_llm, tiny_folder):
    llm = make_llm(tiny_folder, num_kv_blocks=50)
    stream = llm.stream("one", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    llm.shutdown()
    with pytest.raises(EngineClosedError, match="while the request was under way"):
        list(stream)


def test_several_engines_in_one_process_step_in_two_threads(make_llm, tiny_folder):
    engines = [make_llm(tiny_folder, num_kv_blocks=60, max_num_batched_tokens=budget) for budget in (7, 2048)]
    prompts = [f"prompt number {i}" for i in range(12)]
    expected = ids(engines[0].generate(prompts, GREEDY, use_tqdm=False))
    answers: dict[int, list] = {}

    def run(number):
        answers[number] = [ids(engines[number].generate(prompts, GREEDY, use_tqdm=False)) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {0: [expected] * 3, 1: [expected] * 3}


def test_threads_that_share_an_engine_share_its_batches_and_get_their_own_answers(llm):
    prompts = [f"prompt number {i}" for i in range(8)]
    expected = ids(llm.generate(prompts, GREEDY, use_tqdm=False))
    steps = llm.stats().steps
    answers: dict[int, list] = {}
    barrier = threading.Barrier(8)

    def run(number):
        barrier.wait()
        if number % 2:
            answers[number] = ids(llm.generate(prompts[number], GREEDY, use_tqdm=False))[0]
        else:
            text = "".join(llm.stream(prompts[number], GREEDY))
            answers[number] = text

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokenizer = llm.get_tokenizer()
    for number in range(8):
        assert answers[number] == (expected[number] if number % 2 else tokenizer.decode(expected[number]))
    assert llm.stats().steps - steps < 8 * 12


def test_an_engine_that_is_simply_dropped_lets_its_process_end(tiny_folder):
    program = (
        f"from octavo import LLM; print(LLM({str(tiny_folder)!r}, num_kv_blocks=50).generate('a', use_tqdm=False))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "RequestOutput" in done.stdout


def test_the_progress_bar_is_on_standard_error_and_can_be_left_out(llm, capsys):
    llm.generate(["one", "two"], GREEDY)
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert shown.out == ""
    llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_a_config_takes_the_place_of_single_settings(tiny_folder, make_llm):
    config = EngineConfig.from_flat(model=str(tiny_folder), num_kv_blocks=50, block_size=8)
    llm = make_llm(config=config)
    assert llm.config is config
    with pytest.raises(ConfigError, match="not both"):
        LLM(str(tiny_folder), config=config)
    with pytest.raises(ConfigError, match=r"must be an EngineConfig, not 'octavo\.toml'"):
        LLM(config="octavo.toml")
    with pytest.raises(ConfigError, match="temperature is no setting of the engine; it belongs in SamplingParams"):
        LLM(temperature=0)


def test_counters_and_resets_are_visible(llm):
    prompt = "a prompt of more than one block"
    llm.generate(prompt, GREEDY, use_tqdm=False)
    llm.generate(prompt, GREEDY, use_tqdm=False)
    stats = llm.stats()
    assert (stats.queried_tokens, stats.hit_tokens) == (62, 16)
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    refused = llm.reset_prefix_cache()
    assert not refused
    assert "under way" in refused.reason
    stream.close()
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.slow
def test_memory_comes_back_when_engines_end(demo_gguf):
    program = (
        "import gc, psutil\n"
        "from octavo import LLM, SamplingParams\n"
        "used = []\n"
        "for _ in range(4):\n"
        "    with LLM(num_kv_blocks=100) as llm:\n"
        "        llm.generate('one', SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "    llm.shutdown()\n"
        "    del llm\n"
        "    gc.collect()\n"
        "    used.append(psutil.Process().memory_info().rss)\n"
        # What stays is torch and its libraries; a model that stayed would triple it.
        "assert max(used) < 1.25 * used[0], used\n"
        "assert not psutil.Process().children()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


# -- what ends a program ----------------------------------------------------------------------------------------


class ExitingQueue(FCFSQueue):
    contract_version = 1

    def add_request(self, request):
        raise SystemExit(0)


class ExitingBackend(FailingBackend):
    contract_version = 1
    has_exited = False

    def plan(self, batch):
        return TorchSDPABackend.plan(self, batch)

    def write(self, *arguments):
        return TorchSDPABackend.write(self, *arguments)

    def attend(self, *arguments, **options):
        if not type(self).has_exited:
            type(self).has_exited = True
            raise SystemExit("no more")
        return TorchSDPABackend.attend(self, *arguments, **options)


@pytest.mark.timeout(60)
def test_a_queue_that_leaves_by_sys_exit_is_an_error_of_the_call_and_nobody_waits_for_ever(make_llm, tiny_folder):
    with installed({"octavo.request_queues": {"exiting": ExitingQueue}}):
        llm = make_llm(tiny_folder, num_kv_blocks=40, request_queue="exiting")
    with pytest.raises(
        PluginBroken, match=r"The request queue ExitingQueue raised SystemExit: 0 when it was given the request"
    ):
        llm.generate("one", SamplingParams(max_tokens=2), use_tqdm=False)
    assert llm.stats().waiting == 0


@pytest.mark.timeout(60)
def test_a_backend_that_leaves_by_sys_exit_in_a_step_ends_one_call_and_the_engine_goes_on(make_llm, tiny_folder):
    ExitingBackend.has_exited = False
    with installed({"octavo.attention_backends": {"exiting": ExitingBackend}}):
        llm = make_llm(tiny_folder, num_kv_blocks=40, attention_backend="exiting")
    with pytest.raises(StepError, match="failed and was undone: SystemExit: no more"):
        llm.generate("one", SamplingParams(max_tokens=2), use_tqdm=False)
    assert llm.generate("one", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].finished
