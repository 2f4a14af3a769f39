"""The tiny models that other tests rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_models import load, logits_of

from octavo.testing.tiny_models import tiny_llama


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_best_token_usually_stands_clear_of_the_second(tiny_folders: dict[str, Path], family: str) -> None:
    model = load(tiny_folders[family])
    token_ids = [5, 6, 7, 8]
    gaps = []
    for _ in range(32):
        (best, second), (next_token, _) = (part.tolist() for part in logits_of(model, token_ids)[-1].topk(2))
        gaps.append(best - second)
        token_ids.append(next_token)
    assert sorted(gaps)[len(gaps) // 2] > 0.1
    assert len(set(token_ids)) > 16, "a model that repeats itself tests little"


def test_a_seed_gives_the_same_weights_again(tmp_path: Path) -> None:
    first, again, other = (
        logits_of(load(tiny_llama(tmp_path / name, seed=seed)), [1, 2, 3])
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_making_one_draws_nothing_from_the_callers_generator(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = torch.rand(4)
        torch.manual_seed(7)
        tiny_llama(tmp_path)
        assert torch.equal(torch.rand(4), expected)
