"""One try of an attention backend: a spec, a seed, a batch, and a message that says what went wrong and where.

trial = Trial(...)                          of one ability and one seed
trial.run(trial.mixed())                    a random batch through the backend, compared with the definition
raise trial.fault("writes to block 0")      with the spec, the rows, the seed and the line that tries it again
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.interfaces.attention import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.testing.attention.abilities import differing_fields, tolerance_of
from octavo.testing.attention.oracle import PagedCase, make_case, number_size, random_lengths
from octavo.testing.attention.stored_numbers import Floats

Lengths = Sequence[tuple[int, int]]


class Fault(AssertionError):
    """What a backend does wrong, as a message that says how to see it again."""


@dataclass(frozen=True)
class Wanted:
    """A batch and what the definition says about it.

    Attributes:
        output: [num_tokens, num_query_heads, head_dim_v]
        lse: [num_tokens, num_query_heads]
    """

    case: PagedCase
    output: Floats
    lse: Floats


def wanted_of(case: PagedCase) -> Wanted:
    """Compute what the definition says about a batch."""
    return Wanted(case, *case.expected())


@functools.lru_cache(maxsize=512)
def _wanted(spec: AttentionSpec, seed: int, lengths: tuple[tuple[int, int], ...], score_size: float) -> Wanted:
    return wanted_of(make_case(np.random.default_rng(seed), spec, lengths, score_size=score_size))


@dataclass
class Trial:
    """What one test does with one spec and one seed.

    Attributes:
        test: The test, in words.
        ability: What is tried, and the first word of every complaint.
        seed: Of everything random.
        spec: What asks for the ability.
        plain: What `spec` is a change of.
        make_backend: Builds the backend for a spec.
        tolerances: Largest errors by dtype, where not those of `tolerance_of`.
        again: The line that tries this again.
        cases: The batches so far, the last one being the one that complaints are about.
    """

    test: str
    ability: str
    seed: int
    spec: AttentionSpec
    plain: AttentionSpec
    make_backend: Callable[[AttentionSpec], AttentionBackend]
    tolerances: Mapping[str, float]
    again: str
    cases: list[PagedCase] = field(default_factory=list)

    # --- batches

    def mixed(self, variant: int = 0) -> Wanted:
        """Draw a batch of decode rows, prefill rows with and without a prefix, and padding rows between these."""
        seed = self.seed + 1000 * variant
        spec = self.spec
        large = sorted(size for size in (spec.window, spec.chunk, spec.keep_first) if size and size > 64)
        reach = max(large, default=0)
        lengths = [(1, size + more) for size in large for more in (0, 1, 20)]
        lengths += random_lengths(
            np.random.default_rng(seed),
            num_decode=5,
            num_prefill=3,
            num_padding=1,
            max_context=max(70, 2 * spec.block_size + 6, reach + reach // 2),
        )
        return self.rows(lengths, variant=variant)

    def rows(self, lengths: Lengths, *, variant: int = 0, score_size: float = 1.0) -> Wanted:
        """Draw a batch whose rows have the given numbers of (new tokens, context), decode rows first."""
        wanted = _wanted(self.spec, self.seed + 1000 * variant, tuple(lengths), score_size)
        self.cases.append(wanted.case)
        return wanted

    def edge_lengths(self) -> list[tuple[int, int]]:
        """Return rows whose contexts end at, just before and just after the edges of blocks and rules."""
        spec = self.spec
        edges = {spec.block_size, 2 * spec.block_size, spec.keep_first, spec.window, spec.chunk}
        if spec.window is not None:
            edges.add(spec.window + spec.keep_first)
        around = {edge + step for edge in edges if edge for step in (-1, 0, 1)} | {1}
        contexts = sorted(context for context in around if context >= 1)
        decode = [(1, context) for context in contexts]
        whole = [(context, context) for context in contexts if 2 <= context <= 80]
        return decode + whole + [(2, context) for context in contexts if context > 2]

    # --- what a backend does with them

    def run(self, wanted: Wanted, *, fill: int | None = None, slack: float = 1.0) -> Tensor:
        """Put a batch through a new backend and a new cache, with and without log-sum-exp; return the output.

        Args:
            fill: The byte that the cache is full of before; one that makes NaN when not given.
            slack: How many times the usual error is forgiven.
        """
        backend = self.make_backend(wanted.case.spec)
        rows = wanted.case.empty_rows()
        kv_cache = self.fill(backend, wanted.case, rows if fill is None else torch.full_like(rows, fill))
        return self.attend(backend, wanted, kv_cache, backend.plan(wanted.case.batch()), slack=slack)

    def fill(self, backend: AttentionBackend, case: PagedCase, rows: Tensor | None = None) -> Any:
        """Bind `rows`, or a cache full of NaN, and store the batch's histories and new tokens."""
        kv_cache = backend.bind(case.empty_rows() if rows is None else rows, case.kv_cache_spec)
        case.write_history(backend, kv_cache)
        case.write_new_tokens(backend, kv_cache)
        return kv_cache

    def attend(
        self, backend: AttentionBackend, wanted: Wanted, kv_cache: Any, plan: Any, *, slack: float = 1.0
    ) -> Tensor:
        """Attend with and without log-sum-exp over a filled cache, compare both, and return the output."""
        self.cases.append(wanted.case)
        queries = wanted.case.queries()
        output = self.output_of(backend, queries, kv_cache, plan, wanted.case.sinks)
        self.compare(output, wanted.output, wanted.case, "the output", slack)
        with_lse, lse = self.output_and_lse_of(backend, queries, kv_cache, plan, wanted.case.sinks)
        self.compare(with_lse, wanted.output, wanted.case, "the output beside return_lse=True", slack)
        self.compare_lse(lse, wanted.lse, wanted.case, slack)
        return output

    def output_of(
        self, backend: AttentionBackend, queries: Tensor, kv_cache: Any, plan: Any, sinks: Tensor | None
    ) -> Tensor:
        """Attend without asking for the log-sum-exp."""
        result = backend.attend(queries, kv_cache, plan, sinks=_copy(sinks))
        if not isinstance(result, Tensor):
            raise self.fault(f"attend without return_lse returned a {type(result).__name__}; it must return a tensor.")
        return result

    def output_and_lse_of(
        self, backend: AttentionBackend, queries: Tensor, kv_cache: Any, plan: Any, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attend and ask for the log-sum-exp."""
        result = backend.attend(queries, kv_cache, plan, sinks=_copy(sinks), return_lse=True)
        if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Tensor) for part in result)):
            raise self.fault(
                f"attend with return_lse=True returned a {type(result).__name__}; it must return a tuple of two "
                "tensors, output and log-sum-exp."
            )
        return result

    # --- complaints

    def compare(
        self,
        got: Tensor,
        wanted: NDArray[np.floating[Any]],
        case: PagedCase,
        what: str,
        slack: float = 1.0,
    ) -> None:
        """Complain unless every number of the output is within the tolerance of the spec's dtype.

        The tolerance is relative, and absolute for values of size 1: that of larger ones grows with them.

        Args:
            got: [num_tokens, num_query_heads, head_dim_v]
            wanted: As `got`.
            what: What `got` is, for the complaint.
        """
        dtype = case.spec.dtype
        self._compare(got, wanted, case, what, dtype, slack * self._tolerance(dtype), number_size(case.spec))

    def compare_lse(self, got: Tensor, wanted: NDArray[np.floating[Any]], case: PagedCase, slack: float = 1.0) -> None:
        """Complain unless every log-sum-exp is within the tolerance of the spec's dtype, relative and absolute.

        Args:
            got: [num_tokens, num_query_heads]
            wanted: As `got`.
        """
        # It is float32 even of float64, so that it can be no better than that.
        tolerance = slack * max(self._tolerance(name) for name in (case.spec.dtype, "float32"))
        self._compare(got, wanted, case, "the log-sum-exp (natural, sinks included)", "float32", tolerance, 1.0)

    def _compare(
        self,
        got: Tensor,
        wanted: NDArray[np.floating[Any]],
        case: PagedCase,
        what: str,
        dtype: str,
        tolerance: float,
        size: float,
    ) -> None:
        """Complain unless `got` is of a dtype and each of its errors at most tolerance * (size + |wanted|)."""
        if tuple(got.shape) != wanted.shape:
            raise self.fault(f"{what} has shape {tuple(got.shape)}; it must have {wanted.shape}.")
        if got.dtype != getattr(torch, dtype):
            raise self.fault(f"{what} has dtype {got.dtype}; it must have torch.{dtype}.")
        if got.device.type != torch.device(case.spec.device).type:
            raise self.fault(f"{what} is on {got.device}; it must be on {case.spec.device}.")
        numbers = got.detach().to("cpu", torch.float64).numpy()
        with np.errstate(invalid="ignore"):
            errors = np.abs(numbers - wanted)
        errors = np.where(np.isnan(errors), np.inf, errors)
        is_wrong = ~(errors <= tolerance * (size + np.abs(wanted)))
        if not is_wrong.any():
            return
        worst = np.unravel_index(int(np.argmax(np.where(is_wrong, errors, -1))), errors.shape)
        absolute = "" if size == 1 else f" {tolerance * size:.3g}"
        place, value, right = _place(case, int(worst[0]), int(worst[1])), numbers[worst], wanted[worst]
        hint = ""
        if not np.isfinite(value):
            hint = (
                " Slots that no query sees hold NaN and infinities here: what lies there must not be read, or must be "
                "replaced before it is multiplied, since 0 * NaN is NaN."
            )
        raise self.fault(
            f"{what} differs from attention by its definition in {int(is_wrong.sum())} of {is_wrong.size} numbers, "
            f"most in {place}: {value:.6g} instead of {right:.6g}, an error of {errors[worst]:.3g} where "
            f"{tolerance:.3g} is allowed, relative and{absolute} absolute.{hint}"
        )

    def _tolerance(self, dtype: str) -> float:
        return self.tolerances.get(dtype, tolerance_of(dtype))

    def fault(self, text: str) -> Fault:
        """Return the complaint, with all it takes to see the fault again."""
        changes = ", ".join(f"{name}={value!r}" for name, value in differing_fields(self.spec, self.plain).items())
        lines = [f"{self.ability}: {self.test}: {text}", f"  spec: {changes or 'plain'}", f"  plain is: {self.plain}"]
        if self.cases:
            rows = ", ".join(f"{row.num_queries}/{row.context_len}" for row in self.cases[-1].rows)
            lines.append(f"  rows (new tokens/context): {rows}")
        lines += [f"  seed: {self.seed}", f"  again: {self.again}"]
        return Fault("\n".join(lines))


def batch_tensors(batch: AttentionBatch) -> dict[str, NDArray[Any]]:
    """Return copies of everything in a batch that a backend could change."""
    copies = {}
    for name in ("query_starts", "context_lens", "block_table"):
        copies[name] = getattr(batch, name).cpu().numpy().copy()
        copies[f"{name}_host"] = getattr(batch, f"{name}_host").copy()
    copies["slots"] = batch.slots.cpu().numpy().copy()
    return copies


def _copy(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.clone()


def _place(case: PagedCase, token: int, head: int) -> str:
    """Say where a number of the output belongs."""
    start = 0
    for r, row in enumerate(case.rows):
        if token < start + row.num_queries:
            position = row.context_len - row.num_queries + token - start
            return f"row {r}, token {token - start} (position {position} of {row.context_len}), query head {head}"
        start += row.num_queries
    return f"token {token}, query head {head}"
