"""Trials of a model: whatever an engine does with blocks, batches and its cache, the answers are Hugging Face's.

    @pytest.fixture(scope="session")
    def mine(tmp_path_factory):
        return TrialModel(make_tiny_model(tmp_path_factory.mktemp("mine")), span=16)

    @pytest.mark.parametrize("trial", model_trials.TRIALS)
    def test_mine_answers_as_in_transformers(trial, mine):
        model_trials.run(trial, mine, LLM)

    def test_mine_needs_its_window(mine, tmp_path):
        changed = model_trials.perturbed(mine.folder, tmp_path, sliding_window=15)
        model_trials.assert_answers_differ(mine, changed, LLM)

All engines run the same prompts in float32 on the CPU. The prompts are made for layers that give blocks back: most are
longer than what a query reads, and several have a beginning in common.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from octavo.core.kv_cache_config import most_blocks_by_group
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.models.checkpoint import open_checkpoint
from octavo.testing import hugging_face
from octavo.testing.engines import assert_llm_is_idle
from octavo.testing.hugging_face import Expected

if TYPE_CHECKING:
    from octavo.llm import LLM

MakeLLM = Callable[..., "LLM"]

# Ids that a follow-up adds to an earlier prompt.
_NUM_MORE_IDS = 3
# The median distance of the two best logits, at least; below it the weights say too little.
_LEAST_MEDIAN_GAP = 0.1
# Tokens of blocks that hold all requests of a trial at once, in every group, and what the cache keeps of them.
_AMPLE_TOKENS = 16_000


@dataclass(frozen=True)
class Answers:
    """What the oracle generates.

    Attributes:
        expected: Prompts and their continuations.
        num_tokens: Tokens that were asked for, for each prompt.
    """

    expected: tuple[Expected, ...]
    num_tokens: int

    def ordered(self, numbers: Iterable[int]) -> Answers:
        """Return the same with the prompts in that order."""
        return Answers(tuple(self.expected[number] for number in numbers), self.num_tokens)

    def single(self) -> list[Answers]:
        """Return what is generated for each prompt by itself."""
        return [Answers((answer,), self.num_tokens) for answer in self.expected]


@dataclass(frozen=True)
class TrialModel:
    """A model's folder, and what Hugging Face generates with it.

    Attributes:
        folder: A folder that transformers can load.
        span: Tokens after which something begins anew: the largest window or chunk, or the length that rope was made
            for. At least two.
        longest: Tokens in the longest prompt, at least three spans; None for four and some.
        num_tokens: Tokens to generate for each prompt.
        seed: Of the prompts. Another one helps where the oracle's choices are near ties.
        settings: What all engines get, such as `model_impl`. They win over a trial's own.
    """

    folder: Path
    span: int
    longest: int | None = None
    num_tokens: int = 24
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def answers(self) -> Answers:
        """What the oracle generates for the prompts."""
        return self._answers(self._prompts(), self.num_tokens)

    @cached_property
    def follow_ups(self) -> Answers:
        """What it generates for the same prompts with three more ids."""
        rng = self._rng("follow-ups")
        prompts = [[*answer.prompt, *self._ids(rng, _NUM_MORE_IDS)] for answer in self.answers.expected]
        return self._answers(prompts, max(self.num_tokens // 3, 1))

    @property
    def long_prompts(self) -> list[int]:
        """Which prompts are at least 2.5 spans long."""
        return [number for number, answer in enumerate(self.answers.expected) if len(answer.prompt) >= 2.5 * self.span]

    @property
    def max_model_len(self) -> int:
        """Tokens in the longest request of all trials, prompt and answer together."""
        return max(len(answer.prompt) for answer in self.answers.expected) + _NUM_MORE_IDS + self.num_tokens

    def filler(self, number: int, num_tokens: int) -> list[int]:
        """Return a prompt that has nothing in common with the others."""
        return self._ids(self._rng(f"filler {number}"), num_tokens)

    def _prompts(self) -> list[list[int]]:
        span, longest = self.span, self.longest or 4 * self.span + 9
        if span < 2 or longest < 3 * span:
            raise ValueError(f"span is {span} and longest {longest}; they have to be at least 2, and three spans")
        rng = self._rng("prompts")
        common = self._ids(rng, longest)
        # Where the common beginning is left, in the middle of a block as a rule: after two spans, and in the first.
        late, early = 5 * span // 2 + 3, 2 * span // 3 + 1
        return [
            common[:late],
            self._ids(rng, 1),
            common,
            self._ids(rng, span - 1),
            common[:late] + self._ids(rng, 7),
            self._ids(rng, span + 1),
            common[:early] + self._ids(rng, 2 * span),
            common[: late - 1] + self._ids(rng, span),
        ]

    def _answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answers:
        eos_token_ids = open_checkpoint(str(self.folder)).eos_token_ids
        expected = hugging_face.greedy(self._oracle, prompts, num_tokens, eos_token_ids)
        gaps = [gap for answer in expected for gap in answer.gaps]
        num_clear = sum(answer.num_clear_tokens for answer in expected)
        assert num_clear >= 0.95 * len(gaps), f"only {num_clear} of {len(gaps)} tokens can be compared; change the seed"
        assert len(gaps) >= 0.75 * num_tokens * len(prompts), "too many answers end early; change the seed"
        assert median(gaps) > _LEAST_MEDIAN_GAP, f"the best two logits are {median(gaps):.3f} apart in the median"
        return Answers(tuple(expected), num_tokens)

    @cached_property
    def _oracle(self) -> Any:
        return hugging_face.load(self.folder)

    def _ids(self, rng: random.Random, count: int) -> list[int]:
        # The first few are special in the tiny models' vocabulary.
        vocab_size = self._oracle.config.get_text_config().vocab_size
        return [rng.randrange(3, vocab_size) for _ in range(count)]

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")


def run(trial: str, model: TrialModel, make_llm: MakeLLM) -> None:
    """Run one of `TRIALS` or `SLOW_TRIALS`.

    Args:
        trial: Its name.
        model: What to run.
        make_llm: `octavo.LLM`, or what takes the same arguments and returns one.

    Raises:
        AssertionError: An answer is not the oracle's, or the trial did not bring about what it is there for.
    """
    _TRIALS[trial](model, make_llm)


def perturbed(folder: Path, copy: Path, **config_values: Any) -> Path:
    """Make in `copy` the same model with other values in its config.json, and return it. The weights are linked."""
    copy.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file.resolve())
    config = json.loads((folder / "config.json").read_text())
    unchanged = [key for key, value in config_values.items() if key in config and config[key] == value]
    assert not unchanged, f"the config says so already: {', '.join(unchanged)}"
    (copy / "config.json").write_text(json.dumps(config | config_values))
    return copy


def assert_answers_differ(model: TrialModel, folder: Path, make_llm: MakeLLM) -> None:
    """Check that the oracle's answers tell `model` from the one in `folder`: Octavo's with that one are others."""
    with _engine(model, make_llm, folder=folder, enable_prefix_caching=False) as llm:
        outputs = _generate(llm, model.answers)
    for answer, output in zip(model.answers.expected, outputs, strict=True):
        num_clear = answer.num_clear_tokens
        if list(output.outputs[0].token_ids[:num_clear]) != answer.token_ids[:num_clear]:
            return
    raise AssertionError(f"{folder} answers like {model.folder}, so the trials would not tell one from the other")


# -- the trials ---------------------------------------------------------------------------------------------------


def _one_by_one(model: TrialModel, make_llm: MakeLLM) -> None:
    with _engine(model, make_llm, enable_prefix_caching=False) as llm:
        _check_one_by_one(llm, model.answers)


def _in_a_batch(model: TrialModel, make_llm: MakeLLM, **settings: Any) -> None:
    with _engine(model, make_llm, **settings) as llm:
        _check(llm, model.answers)


def _beyond_a_span(model: TrialModel, make_llm: MakeLLM) -> None:
    _in_a_batch(model, make_llm, max_num_batched_tokens=2 * model.span - 1)


def _branches(model: TrialModel, make_llm: MakeLLM) -> None:
    with _engine(model, make_llm) as llm:
        outputs = _check_one_by_one(llm, model.answers)
    assert _num_cached_tokens(outputs) > 0, "no beginning in common was found"


def _warm(model: TrialModel, make_llm: MakeLLM, **settings: Any) -> None:
    with _engine(model, make_llm, **settings) as llm:
        _check(llm, model.answers)
        again, further = _check(llm, model.answers), _check(llm, model.follow_ups)
    for number in model.long_prompts:
        assert again[number].num_cached_tokens > 0, f"nothing was found for prompt {number}"
        assert further[number].num_cached_tokens > 0, f"nothing was found for prompt {number} and three ids"


def _partly_evicted(model: TrialModel, make_llm: MakeLLM, **settings: Any) -> None:
    with _engine(model, make_llm, **settings) as llm:
        _check(llm, model.answers)
        num_cached = llm.stats().cached_blocks
        num_blocks = 1 + num_cached + _most_blocks(llm, model.max_model_len)
        untouched = _check(llm, model.follow_ups)
    with _engine(model, make_llm, num_kv_blocks=num_blocks, **settings) as llm:
        _check(llm, model.answers)
        outputs = []
        for follow_up in model.follow_ups.single():
            _evict(llm, model, -(-num_cached // 4))
            outputs += _generate(llm, follow_up)
    left, all_there = (_num_cached_tokens(found) for found in (_compared(model.follow_ups, outputs), untouched))
    assert 0 < left < all_there, f"{left} of {all_there} cached tokens were left"


def _holes(model: TrialModel, make_llm: MakeLLM, **settings: Any) -> None:
    found: list[RequestOutput] = []
    with _engine(model, make_llm, **settings) as llm:
        for group_id in range(len(llm.selection.groups)):
            _check(llm, model.answers)
            _forget_some_blocks(llm, group_id, model.seed)
            found += _check(llm, model.follow_ups)
    assert _num_cached_tokens(found) > 0, "nothing was found"


def _memory_runs_out(model: TrialModel, make_llm: MakeLLM, **settings: Any) -> None:
    settings = {"block_size": 1, "max_num_batched_tokens": 16} | settings
    with _engine(model, make_llm, **settings) as llm:
        num_blocks = 1 + _most_blocks(llm, model.max_model_len)
    # The short ones first: many are admitted, and then grow.
    rising = sorted(range(len(model.answers.expected)), key=lambda number: len(model.answers.expected[number].prompt))
    with _engine(model, make_llm, num_kv_blocks=num_blocks, **settings) as llm:
        _check(llm, model.answers.ordered(rising))
        _check(llm, model.answers.ordered(reversed(rising)))
        assert llm.stats().preemptions > 0, f"{num_blocks} blocks were enough for all"


_TRIALS: dict[str, Callable[[TrialModel, MakeLLM], None]] = {
    "one by one": _one_by_one,
    "in a batch": _in_a_batch,
    "budget of 7": partial(_in_a_batch, max_num_batched_tokens=7),
    "budget beyond a span": _beyond_a_span,
    "blocks of 1": partial(_in_a_batch, block_size=1),
    "blocks of 16": partial(_in_a_batch, block_size=16),
    "whole prompts": partial(_in_a_batch, enable_chunked_prefill=False),
    "steps planned ahead": partial(_warm, async_scheduling=True),
    "all tokens kept": partial(_warm, disable_hybrid_kv_cache_manager=True),
    "warm": _warm,
    "warm with blocks of 16": partial(_warm, block_size=16),
    "branches": _branches,
    "partly evicted": _partly_evicted,
    "holes in the cache": _holes,
    "memory runs out": _memory_runs_out,
    # Slow from here on.
    "warm with blocks of 1": partial(_warm, block_size=1),
    "warm with a budget of 7": partial(_warm, max_num_batched_tokens=7),
    "holes in the cache with blocks of 1": partial(_holes, block_size=1),
    "partly evicted with blocks of 16": partial(_partly_evicted, block_size=16),
    "memory runs out without a cache": partial(_memory_runs_out, enable_prefix_caching=False),
    "memory runs out with blocks of 4": partial(_memory_runs_out, block_size=4),
    "memory runs out under steps planned ahead": partial(_memory_runs_out, async_scheduling=True),
}
_NUM_QUICK_TRIALS = 15
TRIALS = tuple(_TRIALS)[:_NUM_QUICK_TRIALS]
SLOW_TRIALS = tuple(_TRIALS)[_NUM_QUICK_TRIALS:]


# -- engines ------------------------------------------------------------------------------------------------------


@contextmanager
def _engine(model: TrialModel, make_llm: MakeLLM, *, folder: Path | None = None, **settings: Any) -> Iterator[LLM]:
    """Make an engine with an ample pool and blocks of four tokens, unless told otherwise. Nothing may leak in it."""
    settings = {"dtype": "float32", "device": "cpu", "block_size": 4, **settings, **model.settings}
    settings.setdefault("num_kv_blocks", _AMPLE_TOKENS // settings["block_size"])
    llm = make_llm(str(folder or model.folder), **settings)
    try:
        yield llm
        assert_llm_is_idle(llm)
    finally:
        llm.shutdown()


def _check(llm: LLM, answers: Answers) -> list[RequestOutput]:
    """Run prompts at once, compare what comes of them with the oracle's, and return it."""
    return _compared(answers, _generate(llm, answers))


def _check_one_by_one(llm: LLM, answers: Answers) -> list[RequestOutput]:
    return _compared(answers, [_generate(llm, answer)[0] for answer in answers.single()])


def _compared(answers: Answers, outputs: list[RequestOutput]) -> list[RequestOutput]:
    hugging_face.assert_equal_where_clear(answers.expected, [output.outputs[0].token_ids for output in outputs])
    return outputs


def _generate(llm: LLM, answers: Answers) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=answers.num_tokens, detokenize=False)
    return llm.generate([answer.prompt for answer in answers.expected], params, use_tqdm=False)


def _evict(llm: LLM, model: TrialModel, num_blocks: int) -> None:
    """Run other prompts of one block each until so many more blocks were handed out for other content."""
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    num_tokens = llm.config.cache.block_size + 1
    stats = llm.stats()
    wanted = stats.evicted_blocks + num_blocks
    while stats.evicted_blocks < wanted:
        llm.generate([model.filler(stats.added_requests, num_tokens)], params, use_tqdm=False)
        stats = llm.stats()


def _forget_some_blocks(llm: LLM, group_id: int, seed: int) -> None:
    """Make a quarter of the cached blocks of one group unfindable, wherever they stand in a prompt."""
    pool = llm._engine.scheduler.kv_cache_manager.pool

    def forget() -> None:
        in_group = [blocks for (group, _), blocks in pool.cached_blocks().items() if group == group_id]
        for blocks in random.Random(seed).sample(in_group, len(in_group) // 4):
            pool.forget_blocks(blocks)

    llm._engine_thread.call(forget)


def _num_cached_tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(output.num_cached_tokens for output in outputs)


def _most_blocks(llm: LLM, num_tokens: int) -> int:
    """Return how many blocks a request of so many tokens holds at most."""
    kv_cache_manager = llm._engine.scheduler.kv_cache_manager
    managers = kv_cache_manager.coordinator.managers
    classes, specs = [type(manager) for manager in managers], [manager.spec for manager in managers]
    return sum(most_blocks_by_group(classes, specs, num_tokens, kv_cache_manager.max_tokens_in_flight))
