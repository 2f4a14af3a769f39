"""What `octavo plan` says: an object for a program, lines for people."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig

if TYPE_CHECKING:
    from octavo.core.interfaces import KVCacheSpec
    from octavo.core.kv_cache_config import Padding
    from octavo.core.kv_cache_plan import CachePlan, Concurrency, GroupPlan, SpecPlan
    from octavo.selection.report import Chosen, ModelNeeds

# Characters of the longest bar.
BAR_WIDTH = 40


@dataclasses.dataclass(frozen=True)
class PlanAnswer:
    """What there is to say.

    Attributes:
        config: The settings.
        needs: The model.
        managers: Each group's.
        memory_source: Who said how large the KV cache is.
        plan: What it holds.
        switched: What would be with the other value of disable_hybrid_kv_cache_manager; None where it is the same.
        unquantised: What would be with keys and values in the model's dtype; None where the KV cache is not quantised.
    """

    config: EngineConfig
    needs: "ModelNeeds"
    managers: Sequence["Chosen"]
    memory_source: str
    plan: "CachePlan"
    switched: "CachePlan | None"
    unquantised: "CachePlan | None"

    def as_object(self) -> dict[str, Any]:
        plan, layout = self.plan, self.plan.kv_cache_config
        at_most = plan.concurrency_at(plan.max_model_len)
        return {
            "model": self.config.model,
            "device": self.needs.device,
            "dtype": self.needs.dtype,
            "kv_cache_dtype": self._kv_cache_dtype,
            "kv_cache_scales": self.needs.kv_scales.origin or None,
            "model_class": self.needs.model.part.plugin.name,
            "memory_bytes": plan.available_bytes,
            "memory_source": self.memory_source,
            "num_blocks": plan.num_blocks,
            "num_usable_blocks": plan.num_usable_blocks,
            "bytes_per_token": _whole(plan.bytes_per_token),
            "lasting_bytes_per_token": _whole(plan.lasting_bytes_per_token),
            "hit_alignment": plan.hit_alignment,
            "bytes_per_block": layout.bytes_per_block,
            "total_bytes": layout.total_bytes,
            "unused_bytes": plan.unused_bytes,
            "max_position": plan.limits.max_position,
            "longest_request": plan.longest_request,
            "max_model_len": plan.max_model_len,
            "max_model_len_source": self.config.source_of("max_model_len"),
            "blocks_per_request": at_most.blocks_per_request,
            "bytes_per_request": at_most.blocks_per_request * layout.bytes_per_block,
            "idle_share": plan.idle_share,
            "max_concurrency": at_most.exact,
            "max_num_seqs": self.config.scheduler.max_num_seqs,
            "max_num_batched_tokens": self.config.scheduler.max_num_batched_tokens,
            "max_running_requests": self._max_running,
            "disable_hybrid_kv_cache_manager": self.config.cache.disable_hybrid_kv_cache_manager,
            "switched": None if self.switched is None else self._other_object(self.switched),
            "unquantised": None if self.unquantised is None else self._unquantised_object(self.unquantised),
            "groups": [self._group_object(of_spec) for of_spec in plan.groups_by_spec],
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

    def _group_object(self, of_spec: "SpecPlan") -> dict[str, Any]:
        """Return what there is to say of the groups of one spec."""
        spec, attention_specs = of_spec.spec, self.needs.spec.attention_specs
        return {
            "kind": spec.kind,
            "num_groups": len(of_spec.groups),
            "layers": list(of_spec.layers),
            "layers_by_group": [list(group.group.layers) for group in of_spec.groups],
            "spec": {"class": type(spec).__name__, **dataclasses.asdict(spec)},
            "stated_block_size": self._stated(of_spec).block_size,
            "windows": [attention_specs[layer].window for layer in of_spec.layers],
            "chunks": [attention_specs[layer].chunk for layer in of_spec.layers],
            "manager": self._manager_of(of_spec).part.plugin.name,
            "page_bytes": of_spec.page_bytes,
            "scale_bytes": of_spec.scale_bytes,
            "bytes_per_token": _whole(of_spec.bytes_per_token),
            "is_bounded": of_spec.is_bounded,
            "unused_bytes_per_block": [group.unused_bytes_per_block for group in of_spec.groups],
            "blocks_per_request": of_spec.blocks_per_request,
            "bytes_per_request": of_spec.bytes_per_request,
        }

    def _other_object(self, other: "CachePlan") -> dict[str, Any]:
        """Return what the same memory would hold with other settings."""
        row = other.concurrency_at(self.plan.max_model_len)
        return {
            "num_blocks": other.num_blocks,
            "bytes_per_block": other.kv_cache_config.bytes_per_block,
            "longest_request": other.longest_request,
            "blocks_per_request": row.blocks_per_request,
            "bytes_per_request": row.blocks_per_request * other.kv_cache_config.bytes_per_block,
            "max_concurrency": row.exact,
        }

    def _unquantised_object(self, unquantised: "CachePlan") -> dict[str, Any]:
        """Return what the same memory would hold with keys and values in the model's dtype, and how much more it is."""
        return {
            "kv_cache_dtype": self.needs.dtype,
            **self._other_object(unquantised),
            "factor": self._gain_over(unquantised),
        }

    def _gain_over(self, unquantised: "CachePlan") -> float | None:
        """Return how many times as many requests fit at a time; None where none would without quantisation."""
        here, there = (plan.concurrency_at(self.plan.max_model_len).exact for plan in (self.plan, unquantised))
        return here / there if there else None

    def lines(self) -> Iterator[str]:
        needs, plan = self.needs, self.plan
        yield (
            f"{self.config.model or 'demo model'} on {needs.device} in {needs.dtype}, KV cache in "
            f"{self._kv_cache_dtype}, model class {needs.model}"
        )
        yield ""
        yield f"memory           {_size(plan.available_bytes)}, {self.memory_source}"
        block_bytes = plan.kv_cache_config.bytes_per_block
        yield f"blocks           {plan.num_blocks} of {_size(block_bytes)}, one of them the null block"
        yield f"bytes a token    {self._bytes_per_token()}"
        if needs.kv_scales.origin:
            yield f"scales           {needs.kv_scales.origin}"
        if plan.hit_alignment != min(group.group.spec.block_size for group in plan.groups):
            yield f"prefix hits      end at multiples of {plan.hit_alignment} tokens, whole blocks of every group"
        yield f"longest request  {self._longest_request()}"
        if self.config.max_model_len != "auto":
            yield f"max_model_len    {plan.max_model_len} tokens, by {self.config.source_of('max_model_len')}"
        yield from self._whole_request_lines()
        for of_spec in plan.groups_by_spec:
            yield ""
            yield from self._group_lines(of_spec)
        yield ""
        yield "where the memory goes"
        whole = plan.available_bytes
        parts = list(self._memory_parts())
        yield from _bars([(label, part, f"{part / whole:6.1%}  {_rough(part)}") for label, part in parts], whole)
        yield ""
        yield from self._concurrency_lines()
        yield from self._switch_lines()
        yield from self._quantised_lines()

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
        return f"{longest} tokens, which is what the memory holds; the model's positions go up to {max_position}"

    def _bytes_per_token(self) -> str:
        plan = self.plan
        if not any(group.is_bounded for group in plan.groups):
            return _size(plan.bytes_per_token)
        return (
            f"{_size(plan.bytes_per_token)} while all layers keep it, {_size(plan.lasting_bytes_per_token)} until its "
            "request ends"
        )

    def _whole_request_lines(self) -> Iterator[str]:
        """Say what a request takes in all groups together, where there are several."""
        plan = self.plan
        if len(plan.groups) == 1:
            return
        row = plan.concurrency_at(plan.max_model_len)
        num_bytes = row.blocks_per_request * plan.kv_cache_config.bytes_per_block
        yield (
            f"a request        of {plan.max_model_len} tokens holds at most "
            f"{_count(row.blocks_per_request, 'block')}, {_size(num_bytes)}, in {len(plan.groups)} groups"
        )
        if plan.idle_share:
            yield f"padding          {_per_cent(plan.idle_share)} of that lies idle"

    def _manager_of(self, of_spec: "SpecPlan") -> "Chosen":
        return self.managers[self.plan.groups.index(of_spec.groups[0])]

    def _stated(self, of_spec: "SpecPlan") -> "KVCacheSpec":
        """Return what the model states for the layers: in tokens a block it may differ from what they get."""
        return self.needs.stated[of_spec.layers[0]]

    def _group_lines(self, of_spec: "SpecPlan") -> Iterator[str]:
        from octavo.core.kv_cache_config import describe_sizes
        from octavo.selection.report import describe_layers

        spec, layers, num_groups = of_spec.spec, describe_layers(of_spec.layers), len(of_spec.groups)
        yield f"{spec.kind} ({layers}), each keeps {spec}"
        yield from self._window_lines(of_spec)
        if num_groups > 1:
            sizes = describe_sizes([len(group.group.layers) for group in of_spec.groups])
            yield f"  KV-cache groups    {num_groups} of {sizes}"
        yield f"  KV-cache manager   {self._manager_of(of_spec)}"
        kept = ", while it is kept" if of_spec.is_bounded else ""
        yield f"  bytes a token      {_size(of_spec.bytes_per_token)} in {layers}{kept}"
        tokens = _count(spec.block_size, "token")
        yield f"  bytes a page       {_size(of_spec.page_bytes)}, for a block of {tokens} in one layer"
        if of_spec.scale_bytes:
            yield f"  of that, scales    {_size(of_spec.scale_bytes)}: a float32 for each vector of a token and head"
        stated = self._stated(of_spec).block_size
        if stated != spec.block_size:
            yield f"  tokens a block     {spec.block_size} instead of {stated}: so its page is as large as the others'"
        yield from _padding_lines(of_spec)
        in_each = f" in each group, {of_spec.blocks_per_request} together" if num_groups > 1 else ""
        yield (
            f"  a request          of {self.plan.max_model_len} tokens holds at most "
            f"{_count(of_spec.groups[0].blocks_per_request, 'block')}{in_each}, {_size(of_spec.bytes_per_request)}"
        )

    def _window_lines(self, of_spec: "SpecPlan") -> Iterator[str]:
        """Say of layers whose queries see a window, or a chunk, that they keep all tokens nevertheless."""
        from octavo.selection.report import describe_layers

        if of_spec.is_bounded:
            return
        by_reach: dict[tuple[str, int], list[int]] = {}
        for layer in of_spec.layers:
            attention = self.needs.spec.attention_specs[layer]
            for label, reach in (("window", attention.window), ("chunk", attention.chunk)):
                if reach is not None:
                    by_reach.setdefault((label, reach), []).append(layer)
        for (label, reach), layers in by_reach.items():
            seen = _count(reach, "token")
            yield f"  {label:17}  {seen} in {describe_layers(layers)}; all tokens are kept nevertheless"

    def _switch_lines(self) -> Iterator[str]:
        """Say what the same memory would hold with the other value of the switch, where two decimals show it."""
        if self.switched is None:
            return
        name, num_tokens = "disable_hybrid_kv_cache_manager", self.plan.max_model_len
        here, there = self.plan.concurrency_at(num_tokens), self.switched.concurrency_at(num_tokens)
        if _times(here) == _times(there):
            return
        # A setting that was chosen is said to be, for it is the one that costs.
        with_it = f"with {name}"
        if self.config.cache.disable_hybrid_kv_cache_manager:
            with_it = f"without {name}, which is set by {self.config.source_of(name)}"
        bytes_here = here.blocks_per_request * self.plan.kv_cache_config.bytes_per_block
        bytes_there = there.blocks_per_request * self.switched.kv_cache_config.bytes_per_block
        yield (
            f"  {with_it}: {_times(there)} instead of {_times(here)}, at {_rough(bytes_there)} a request instead of "
            f"{_rough(bytes_here)}"
        )

    def _quantised_lines(self) -> Iterator[str]:
        """Say what the same memory would hold with keys and values that are not quantised."""
        if self.unquantised is None:
            return
        num_tokens = self.plan.max_model_len
        here, there = self.plan.concurrency_at(num_tokens), self.unquantised.concurrency_at(num_tokens)
        bytes_here = here.blocks_per_request * self.plan.kv_cache_config.bytes_per_block
        bytes_there = there.blocks_per_request * self.unquantised.kv_cache_config.bytes_per_block
        gain = self._gain_over(self.unquantised)
        times = "" if gain is None else f", {int(100 * gain) / 100:.2f} times as many"
        yield (
            f"  with kv_cache_dtype {self.config.cache.kv_cache_dtype}: {_times(here)} instead of {_times(there)} in "
            f"{self.needs.dtype}{times}, at {_rough(bytes_here)} a request instead of {_rough(bytes_there)}"
        )

    def _memory_parts(self) -> Iterator[tuple[str, int]]:
        """Yield what takes part of the memory, and how many bytes."""
        plan, block_bytes = self.plan, self.plan.kv_cache_config.bytes_per_block
        usable_bytes = plan.num_usable_blocks * block_bytes
        held_by_one = sum(group.bytes_per_request for group in plan.groups)
        if held_by_one > usable_bytes:
            yield "usable blocks", usable_bytes
        else:
            for of_spec in plan.groups_by_spec:
                of_kind = f", {of_spec.spec.kind}" if len(plan.groups) > 1 else ""
                yield f"a request of {plan.max_model_len} tokens{of_kind}", of_spec.bytes_per_request
            yield "further requests", usable_bytes - held_by_one
        yield "the null block", block_bytes
        if plan.unused_bytes:
            yield "left over", plan.unused_bytes

    def _concurrency_lines(self) -> Iterator[str]:
        plan, scheduler = self.plan, self.config.scheduler
        rows = _up_to_the_first_that_never_fits(plan.concurrency_by_length())
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
        yield f"  maximum concurrency for {plan.max_model_len} tokens a request: {_times(at_most)}"
        if not at_most.num_requests:
            yield (
                "  A request that grows past the longest one that fits ends with finish_reason 'length' when the KV "
                "cache is full."
            )


def _up_to_the_first_that_never_fits(rows: "Sequence[Concurrency]") -> "list[Concurrency]":
    """Return rows of growing length without those behind the first of which not one request fits."""
    return [row for row, before in zip(rows, (None, *rows), strict=False) if before is None or before.num_requests]


def _bars(rows: Sequence[tuple[str, int, str]], whole: int) -> Iterator[str]:
    """Yield a line with a bar for each row: its label, its share of `whole`, and what to write behind the bar."""
    width = max(len(label) for label, _, _ in rows)
    for label, part, text in rows:
        filled = round(BAR_WIDTH * part / whole) if whole else 0
        # What is too little for a character is still there.
        bar = "#" * filled or ("." if part else "")
        yield f"  {label:{width}}  {bar:{BAR_WIDTH}}  {text}"


def _padding_lines(of_spec: "SpecPlan") -> Iterator[str]:
    """Say what of a block lies idle while a group of the spec holds it."""
    by_padding: dict[Padding, list[GroupPlan]] = {}
    for group in of_spec.groups:
        by_padding.setdefault(group.padding, []).append(group)
    for padding, groups in by_padding.items():
        if not padding.num_bytes:
            continue
        reasons = []
        if padding.num_slots:
            num_slots = padding.num_slots + len(groups[0].group.layers)
            reasons.append(f"{padding.num_slots} of {num_slots} slots for a layer {_are(padding.num_slots)} idle")
        if padding.bytes_per_page:
            reasons.append(f"its pages are {_count(padding.bytes_per_page, 'byte')} shorter than the largest")
        where = f" in {len(groups)} of the groups" if len(groups) < len(of_spec.groups) else ""
        share = padding.num_bytes / groups[0].bytes_per_block
        yield f"  unused in a block  {_size(padding.num_bytes)}, {_per_cent(share)}{where}: {' and '.join(reasons)}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _per_cent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "less than 0.1%"


def _times(concurrency: "Concurrency") -> str:
    """Return how many requests fit at a time, rounded down: 3.999 is not four."""
    return f"{100 * concurrency.num_usable_blocks // concurrency.blocks_per_request / 100:.2f}x"


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
    from octavo.core.kv_cache_config import counted

    return counted(number, noun)
