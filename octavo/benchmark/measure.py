"""Runs workloads on an engine and times each request.

All requests of a workload arrive at once. The first token of a request counts from that moment, so where more wait than
run, it counts the wait too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from octavo.assembly import Assembly
from octavo.benchmark.workloads import Workload
from octavo.core.kv_cache_config import RequestCost
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.stats import EngineStats
from octavo.engine_thread import EngineThread, Mailbox
from octavo.errors import EngineBusyError, InvalidRequestError
from octavo.output_processor import RequestUpdate
from octavo.prompts import ParsedPrompt

WARM_UP_PROMPT_LEN = 40
# Any id will do that every vocabulary has.
WARM_UP_TOKEN_ID = 1


@dataclass(frozen=True)
class Run:
    """A workload, done once.

    Attributes:
        seconds: From the moment that all requests arrive to the last token.
        first_token_seconds: Of each request: from the same moment to its first token.
        token_seconds: Of each request with two tokens or more: from the first to the last, divided by the steps
            between them.
        hit_tokens: Prompt tokens that the prefix cache had.
        recomputed_tokens: Tokens computed again after a preemption.
        preemptions: Times that a running request lost its blocks.
        steps: Steps of the engine.
    """

    seconds: float
    first_token_seconds: list[float]
    token_seconds: list[float]
    hit_tokens: int
    recomputed_tokens: int
    preemptions: int
    steps: int


@dataclass(frozen=True)
class Percentiles:
    """Of a figure of single requests, over all runs; None where no request has it."""

    median: float | None
    p99: float | None


@dataclass(frozen=True)
class Measurement:
    """A workload, done several times.

    Attributes:
        workload: What was done.
        runs: In order.
    """

    workload: Workload
    runs: tuple[Run, ...]

    @property
    def seconds(self) -> float:
        """The median of the runs, which all rates are made of."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def requests_per_s(self) -> float:
        return len(self.workload.prompts) / self.seconds

    @property
    def prompt_tokens_per_s(self) -> float:
        """Cached ones count too: they are served as the others are."""
        return self.workload.num_prompt_tokens / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        return self.workload.num_output_tokens / self.seconds

    @property
    def hit_tokens(self) -> int:
        """The median of the runs, or the run just below it."""
        return statistics.median_low(run.hit_tokens for run in self.runs)

    @property
    def preemptions(self) -> int:
        """As `hit_tokens`."""
        return statistics.median_low(run.preemptions for run in self.runs)

    @property
    def first_token_seconds(self) -> Percentiles:
        return percentiles([seconds for run in self.runs for seconds in run.first_token_seconds])

    @property
    def token_seconds(self) -> Percentiles:
        return percentiles([seconds for run in self.runs for seconds in run.token_seconds])


@dataclass(frozen=True)
class NotRun:
    """A workload that this engine does not do, and why."""

    workload: Workload
    reason: str


def measure(
    thread: EngineThread, workload: Workload, num_runs: int, *, on_run: Callable[[Run], None] = lambda run: None
) -> Measurement | NotRun:
    """Do a workload several times, the prefix cache being empty at the start of each.

    Args:
        thread: The engine; nobody else may use it meanwhile.
        workload: What to do.
        num_runs: How often.
        on_run: Told of each run when it is done.

    Raises:
        StepError, EngineClosedError: The engine failed.
        EngineBusyError: Others use it.
    """
    longest = thread.assembly.engine.max_model_len
    if workload.max_request_len > longest:
        return NotRun(workload, _too_long(thread.assembly, workload.max_request_len))
    runs = []
    for _ in range(num_runs):
        try:
            run = run_once(thread, workload)
        except InvalidRequestError as error:
            return NotRun(workload, str(error).removesuffix("."))
        if isinstance(run, NotRun):
            return run
        on_run(run)
        runs.append(run)
    return Measurement(workload, tuple(runs))


def warm_up(thread: EngineThread) -> None:
    """Let the engine generate one token, so that what happens once has happened before anything is timed."""
    prompt_len = min(WARM_UP_PROMPT_LEN, thread.assembly.engine.max_model_len - 1)
    run_once(thread, Workload("warm-up", ([WARM_UP_TOKEN_ID] * prompt_len,), 1))


def run_once(thread: EngineThread, workload: Workload) -> Run | NotRun:
    """Empty the prefix cache and do a workload.

    Raises:
        InvalidRequestError: The engine does not take one of the prompts.
    """
    reset = thread.call(thread.assembly.engine.reset_prefix_cache)
    if not reset:
        raise EngineBusyError(f"The prefix cache cannot be emptied before a run: {reset.reason}")
    params = SamplingParams(
        temperature=0,
        max_tokens=workload.output_len,
        ignore_eos=True,
        detokenize=thread.assembly.tokenizer is not None,
    )
    prompts = [ParsedPrompt(None, prompt) for prompt in workload.prompts]
    before = thread.call(thread.assembly.engine.stats)
    mailbox = _TimingMailbox(prompts, [params] * len(prompts))
    start = time.perf_counter()
    try:
        thread.submit(mailbox)
        outputs = [mailbox.next_finished() for _ in prompts]
        end = time.perf_counter()
    finally:
        thread.close(mailbox)
    for output in outputs:
        if (fault := _fault(output, workload.output_len)) is not None:
            return NotRun(workload, fault)
    return _as_run(mailbox, start, end, before, thread.call(thread.assembly.engine.stats))


def _too_long(assembly: Assembly, num_tokens: int) -> str:
    """Say what keeps an engine from a request of so many tokens, and what would do."""
    max_model_len, max_position = assembly.engine.max_model_len, assembly.selection.needs.spec.max_position
    said = f"its longest request takes {num_tokens} tokens, and max_model_len is {max_model_len}"
    if num_tokens > max_position:
        return f"{said}; this model's positions go up to {max_position}"
    layout = assembly.kv_cache_config
    cost = RequestCost(
        layout.groups,
        tuple(selected.manager.part.loaded for selected in assembly.selection.groups),
        assembly.engine.scheduler.max_num_batched_tokens,
    )
    num_blocks = 1 + cost.num_blocks(num_tokens)
    if num_blocks <= layout.num_blocks:
        return f"{said}; set it to {num_tokens} or more, or leave it out"
    fits = cost.longest_request(layout.num_blocks - 1, max_position)
    way_out = (
        f"give it {num_blocks} blocks (num_kv_blocks) or {num_blocks * layout.bytes_per_block} bytes "
        "(kv_cache_memory_bytes)"
    )
    if fits == max_model_len:
        return f"{said}, as long as the KV cache of {layout.num_blocks} blocks allows; {way_out} or more"
    return (
        f"{said}; set it to {num_tokens} or leave it out, and as the KV cache of {layout.num_blocks} blocks holds "
        f"requests of up to {fits} tokens, {way_out} or more"
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return the median, and the value that 99 of 100 do not exceed."""
    if not values:
        return Percentiles(None, None)
    ordered = sorted(values)
    # The nearest rank: a value that was measured, and with fewer than 100 the largest.
    return Percentiles(statistics.median(ordered), ordered[-(len(ordered) // 100) - 1])


class _TimingMailbox(Mailbox):
    """Notes when tokens come, and hands on what is finished only.

    The time is taken in the engine's thread, where the news are put in: a reader that woke up for each token would take
    processor time from the engine, and see the token late.

    Attributes:
        times: Of each request with news so far: when its first and its last token came, and how many have come.
    """

    def __init__(self, prompts: Sequence[ParsedPrompt], params: Sequence[SamplingParams]) -> None:
        super().__init__(prompts, params, wants_updates=True)
        self.news = _TimingQueue()
        self.times = self.news.times

    def next_finished(self) -> RequestOutput:
        """Wait for the next request to finish. Raises what went wrong."""
        news = self.next_news()
        assert isinstance(news, RequestOutput)
        return news


@dataclass
class _TokenTimes:
    first: float
    last: float
    num_first: int
    num_tokens: int


class _TimingQueue(SimpleQueue[RequestUpdate | RequestOutput | Exception]):
    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, _TokenTimes] = {}

    def put(
        self, item: RequestUpdate | RequestOutput | Exception, block: bool = True, timeout: float | None = None
    ) -> None:
        if not isinstance(item, RequestUpdate):
            super().put(item, block, timeout)
            return
        now, num_new = time.perf_counter(), len(item.new_token_ids)
        times = self.times.get(item.request_id)
        if times is None:
            self.times[item.request_id] = _TokenTimes(now, now, num_new, num_new)
        else:
            times.last = now
            times.num_tokens += num_new


def _fault(output: RequestOutput, output_len: int) -> str | None:
    """Say how a request ended short of what was asked for; None when it did not."""
    (choice,) = output.outputs
    if choice.finish_reason == "length" and len(choice.token_ids) == output_len:
        return None
    reason = choice.stop_reason or choice.finish_reason
    return f"{output.request_id} ended after {len(choice.token_ids)} of {output_len} tokens ({reason})"


def _as_run(mailbox: _TimingMailbox, start: float, end: float, before: EngineStats, after: EngineStats) -> Run:
    times = [mailbox.times[request_id] for request_id in mailbox.request_ids]
    return Run(
        seconds=end - start,
        first_token_seconds=[each.first - start for each in times],
        token_seconds=[
            (each.last - each.first) / (each.num_tokens - each.num_first)
            for each in times
            if each.num_tokens > each.num_first
        ],
        hit_tokens=after.hit_tokens - before.hit_tokens,
        recomputed_tokens=after.recomputed_tokens - before.recomputed_tokens,
        preemptions=after.preemptions - before.preemptions,
        steps=after.steps - before.steps,
    )
