"""`octavo plan`: what a KV cache of some size holds."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.memory_size import parse_memory_size
from octavo.cli.options import with_engine_options, with_model
from octavo.config import EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.core.kv_cache_plan import CachePlan, GroupPlan
    from octavo.selection.report import Chosen, ModelNeeds

# Characters of the longest bar.
BAR_WIDTH = 40


@with_engine_options
def plan(
    *,
    model_argument: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="As --model, or a config.json alone. Without it, the demo model."),
    ] = None,
    config: EngineConfig,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the KV cache, such as 8GiB, 1.5GB or bytes. Without it: what the settings say, or what an "
            "engine would take here.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object for a program to read.")] = False,
) -> None:
    """Say what a KV cache holds for MODEL: bytes a token, blocks, the longest request, and how many requests at a time
    by their length. No weight is read and nothing is allocated; the settings count as they would for an engine, and
    --device may name one that is not here."""
    config = with_model(config, model_argument)
    given_bytes = None if memory is None else _given_bytes(memory, config)
    from octavo.plugins.registry import scan
    from octavo.selection.managers import choose_managers, named_managers
    from octavo.selection.select import model_needs_elsewhere

    registry = scan()
    # What a package prints when it is imported or asked must not get between the lines of the answer.
    with redirect_stdout(sys.stderr):
        named = named_managers(config, registry)
        needs = model_needs_elsewhere(config, registry)
        managers = choose_managers(registry, named, needs.groups)
        size = _size_of_cache(config, needs.device, given_bytes)
        answer = _Answer(config, needs, managers, size, _make_plan(config, needs, managers, size))
        shown = json.dumps(answer.as_object(), default=str) if as_json else "\n".join(answer.lines())
    print(shown)


# -- the plan ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _CacheSize:
    """How large the KV cache is to be: a number of blocks, or else of bytes.

    Attributes:
        source: Where that comes from.
    """

    num_blocks: int | None
    num_bytes: int
    source: str


def _given_bytes(memory: str, config: EngineConfig) -> int:
    for name in ("num_kv_blocks", "kv_cache_memory_bytes"):
        source = config.source_of(name)
        # What a file says is overridden; two flags contradict each other.
        if source.startswith("flag"):
            raise ConfigError(f"The size of the KV cache is given twice, by --memory and by {source}; leave one out.")
    return parse_memory_size("--memory", memory)


def _size_of_cache(config: EngineConfig, device: str, given_bytes: int | None) -> _CacheSize:
    cache = config.cache
    if given_bytes is not None:
        return _CacheSize(None, given_bytes, "given by --memory")
    if cache.num_kv_blocks is not None:
        return _CacheSize(cache.num_kv_blocks, 0, f"num_kv_blocks by {config.source_of('num_kv_blocks')}")
    if cache.kv_cache_memory_bytes is not None:
        source = f"kv_cache_memory_bytes by {config.source_of('kv_cache_memory_bytes')}"
        return _CacheSize(None, cache.kv_cache_memory_bytes, source)
    if device != "cpu":
        raise ConfigError(
            f"How much memory the KV cache gets on {device} is measured when an engine starts, with the weights "
            "loaded. Say what to plan with, such as --memory 8GiB."
        )
    from octavo.core.memory import cpu_kv_cache_bytes

    source = f"{cache.cpu_memory_share:g} of what is free here now; an engine takes it with the weights loaded"
    return _CacheSize(None, cpu_kv_cache_bytes(cache.cpu_memory_share), source)


def _make_plan(
    config: EngineConfig, needs: "ModelNeeds", managers: Sequence["Chosen"], size: _CacheSize
) -> "CachePlan":
    from octavo.core.kv_cache_plan import RequestLimits, plan_from_blocks, plan_from_memory
    from octavo.selection.managers import request_cost

    limits = RequestLimits(needs.spec.max_position, config.max_model_len)
    cost = request_cost(config, managers, needs.groups)
    if size.num_blocks is not None:
        return plan_from_blocks(size.num_blocks, cost, limits)
    return plan_from_memory(size.num_bytes, cost, limits)


# -- the answer -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What there is to say.

    Attributes:
        managers: Each group's.
    """

    config: EngineConfig
    needs: "ModelNeeds"
    managers: Sequence["Chosen"]
    size: _CacheSize
    plan: "CachePlan"

    def as_object(self) -> dict[str, Any]:
        plan, layout = self.plan, self.plan.kv_cache_config
        at_most = plan.concurrency_at(plan.max_model_len)
        return {
            "model": self.config.model,
            "device": self.needs.device,
            "dtype": self.needs.dtype,
            "kv_cache_dtype": self._kv_cache_dtype,
            "model_class": self.needs.model.part.plugin.name,
            "memory_bytes": plan.available_bytes,
            "memory_source": self.size.source,
            "num_blocks": plan.num_blocks,
            "num_usable_blocks": plan.num_usable_blocks,
            "bytes_per_token": _whole(plan.bytes_per_token),
            "bytes_per_block": layout.bytes_per_block,
            "total_bytes": layout.total_bytes,
            "unused_bytes": plan.unused_bytes,
            "max_position": plan.limits.max_position,
            "longest_request": plan.longest_request,
            "max_model_len": plan.max_model_len,
            "max_model_len_source": self.config.source_of("max_model_len"),
            "max_concurrency": at_most.exact,
            "max_num_seqs": self.config.scheduler.max_num_seqs,
            "max_num_batched_tokens": self.config.scheduler.max_num_batched_tokens,
            "max_running_requests": self._max_running,
            "groups": [
                {
                    "kind": group.group.spec.kind,
                    "layers": list(group.group.layers),
                    "spec": {"class": type(group.group.spec).__name__, **dataclasses.asdict(group.group.spec)},
                    "windows": [self.needs.spec.attention_specs[layer].window for layer in group.group.layers],
                    "chunks": [self.needs.spec.attention_specs[layer].chunk for layer in group.group.layers],
                    "manager": manager.part.plugin.name,
                    "page_bytes": group.page_bytes,
                    "bytes_per_token": _whole(group.bytes_per_token),
                    "unused_bytes_per_block": group.unused_bytes_per_block,
                    "blocks_per_request": group.blocks_per_request,
                    "bytes_per_request": group.bytes_per_request,
                }
                for group, manager in zip(plan.groups, self.managers, strict=True)
            ],
            "concurrency": [
                {
                    "num_tokens": row.num_tokens,
                    "blocks_per_request": row.blocks_per_request,
                    "bytes_per_request": row.blocks_per_request * layout.bytes_per_block,
                    "num_requests": row.num_requests,
                    "exact": row.exact,
                }
                for row in plan.concurrency_by_length()
            ],
        }

    def lines(self) -> Iterator[str]:
        needs, plan = self.needs, self.plan
        yield (
            f"{self.config.model or 'demo model'} on {needs.device} in {needs.dtype}, KV cache in "
            f"{self._kv_cache_dtype}, model class {needs.model}"
        )
        yield ""
        yield f"memory           {_size(plan.available_bytes)}, {self.size.source}"
        block_bytes = plan.kv_cache_config.bytes_per_block
        yield f"blocks           {plan.num_blocks} of {_size(block_bytes)}, one of them the null block"
        yield f"bytes a token    {_size(plan.bytes_per_token)}"
        yield f"longest request  {self._longest_request()}"
        if self.config.max_model_len != "auto":
            yield f"max_model_len    {plan.max_model_len} tokens, by {self.config.source_of('max_model_len')}"
        for group, manager in zip(plan.groups, self.managers, strict=True):
            yield ""
            yield from self._group_lines(group, manager)
        yield ""
        yield "where the memory goes"
        whole = plan.available_bytes
        parts = list(self._memory_parts())
        yield from _bars([(label, part, f"{part / whole:6.1%}  {_rough(part)}") for label, part in parts], whole)
        yield ""
        yield from self._concurrency_lines()

    @property
    def _kv_cache_dtype(self) -> str:
        return self.needs.spec.attention_specs[0].kv_dtype

    @property
    def _max_running(self) -> int:
        """Requests that an engine runs at a time, the KV cache left aside: each takes a token of every step."""
        scheduler = self.config.scheduler
        return min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)

    def _longest_request(self) -> str:
        longest, max_position = self.plan.longest_request, self.plan.limits.max_position
        if longest == max_position:
            return f"{longest} tokens, as long as the model's positions go"
        return f"{longest} tokens; the model's positions go up to {max_position}"

    def _group_lines(self, group: "GroupPlan", manager: "Chosen") -> Iterator[str]:
        from octavo.selection.report import describe_layers

        spec, layers = group.group.spec, describe_layers(group.group.layers)
        yield f"{spec.kind} ({layers}), each keeps {spec}"
        yield from self._window_lines(group)
        yield f"  KV-cache manager   {manager}"
        yield f"  bytes a token      {_size(group.bytes_per_token)} in {layers}"
        tokens = _count(spec.block_size, "token")
        yield f"  bytes a page       {_size(group.page_bytes)}, for a block of {tokens} in one layer"
        if group.unused_bytes_per_block:
            yield f"  unused in a block  {_size(group.unused_bytes_per_block)}"
        yield (
            f"  a request          of {self.plan.max_model_len} tokens holds at most "
            f"{_count(group.blocks_per_request, 'block')}, {_size(group.bytes_per_request)}"
        )

    def _window_lines(self, group: "GroupPlan") -> Iterator[str]:
        """Say of layers whose queries see a window, or a chunk, that they keep all tokens nevertheless."""
        from octavo.core.interfaces import FullAttentionSpec
        from octavo.selection.report import describe_layers

        if type(group.group.spec) is not FullAttentionSpec:
            return
        by_reach: dict[tuple[str, int], list[int]] = {}
        for layer in group.group.layers:
            attention = self.needs.spec.attention_specs[layer]
            for label, reach in (("window", attention.window), ("chunk", attention.chunk)):
                if reach is not None:
                    by_reach.setdefault((label, reach), []).append(layer)
        for (label, reach), layers in by_reach.items():
            seen = _count(reach, "token")
            yield f"  {label:17}  {seen} in {describe_layers(layers)}; all tokens are kept nevertheless"

    def _memory_parts(self) -> Iterator[tuple[str, int]]:
        """Yield what takes part of the memory, and how many bytes."""
        plan, block_bytes = self.plan, self.plan.kv_cache_config.bytes_per_block
        usable_bytes = plan.num_usable_blocks * block_bytes
        held_by_one = sum(group.bytes_per_request for group in plan.groups)
        if held_by_one > usable_bytes:
            yield "usable blocks", usable_bytes
        else:
            for group in plan.groups:
                of_group = f", {group.group.spec.kind}" if len(plan.groups) > 1 else ""
                yield f"a request of {plan.max_model_len} tokens{of_group}", group.bytes_per_request
            yield "further requests", usable_bytes - held_by_one
        yield "the null block", block_bytes
        if plan.unused_bytes:
            yield "left over", plan.unused_bytes

    def _concurrency_lines(self) -> Iterator[str]:
        plan, scheduler = self.plan, self.config.scheduler
        rows = plan.concurrency_by_length()
        most = max(row.num_requests for row in rows)
        yield "requests at a time, by their length, when they share no blocks"
        tokens_width, blocks_width = (len(str(n)) for n in (rows[-1].num_tokens, rows[-1].blocks_per_request))
        labels = [
            f"{row.num_tokens:{tokens_width}} tokens, {row.blocks_per_request:{blocks_width}} blocks" for row in rows
        ]
        counts = [row.num_requests for row in rows]
        yield from _bars([(label, n, str(n)) for label, n in zip(labels, counts, strict=True)], most)
        if most > self._max_running:
            limits = ("max_num_seqs", "max_num_batched_tokens")
            tightest = [name for name in limits if getattr(scheduler, name) == self._max_running]
            yield f"  An engine runs at most {self._max_running} at a time ({', '.join(tightest)})."
        at_most = plan.concurrency_at(plan.max_model_len)
        # Rounded down: 3.999 is not four.
        hundredths = 100 * at_most.num_usable_blocks // at_most.blocks_per_request
        yield f"  maximum concurrency for {plan.max_model_len} tokens a request: {hundredths / 100:.2f}x"
        if not at_most.num_requests:
            yield (
                "  A request that grows past the longest one that fits ends with finish_reason 'length' when the KV "
                "cache is full."
            )


def _bars(rows: Sequence[tuple[str, int, str]], whole: int) -> Iterator[str]:
    """Yield a line with a bar for each row: its label, its share of `whole`, and what to write behind the bar."""
    width = max(len(label) for label, _, _ in rows)
    for label, part, text in rows:
        filled = round(BAR_WIDTH * part / whole) if whole else 0
        # What is too little for a character is still there.
        bar = "#" * filled or ("." if part else "")
        yield f"  {label:{width}}  {bar:{BAR_WIDTH}}  {text}"


def _rough(num_bytes: int) -> str:
    from octavo.core.kv_cache_config import format_bytes

    return format_bytes(num_bytes)


def _size(num_bytes: float) -> str:
    """Return a size as people read it, and in bytes where that says more."""
    whole = _whole(num_bytes)
    exact = _count(whole, "byte") if isinstance(whole, int) else f"{whole:.2f} bytes"
    return exact if num_bytes < 1024 else f"{_rough(int(num_bytes))} ({exact})"


def _whole(number: float) -> int | float:
    """Return a number without a fraction as a whole one."""
    return int(number) if float(number).is_integer() else number


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
