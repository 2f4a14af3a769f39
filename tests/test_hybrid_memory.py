"""What windows save, by benchmarks/hybrid_memory.py on Gemma 3 270M's config: many requests from the same bytes."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "hybrid_memory.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("hybrid_memory", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hybrid_memory"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["hybrid_memory"]


def config_of(benchmark, folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(benchmark.GEMMA_3_270M | changes))
    return str(path)


def test_an_eighth_of_the_window_and_of_the_length_gives_three_times_the_requests(benchmark, tmp_path):
    model = config_of(benchmark, tmp_path, sliding_window=64)
    hybrid, full = benchmark.compare(model, 256 << 20, num_tokens=1024, num_new=512, budget=64)
    assert hybrid.groups == [("sliding_window", 3)] * 5 + [("full_attention", 3)]
    assert full.groups == [("full_attention", 18)]
    assert hybrid.blocks_per_request == [4 + 5] * 5 + [64]
    assert full.blocks_per_request == [64]
    assert hybrid.most_at_a_time == hybrid.finished == 24
    assert full.most_at_a_time == full.finished == 7
    assert hybrid.preemptions == full.preemptions == 0
    # A window of 64 tokens, wherever it begins in a block.
    assert hybrid.most_in_decode == [5] * 5 + [64]


@pytest.mark.slow
def test_gemma_3_270m_serves_three_times_the_requests_of_8192_tokens(benchmark, tmp_path):
    model = config_of(benchmark, tmp_path)
    hybrid, full = benchmark.compare(model, 2 << 30, num_tokens=8192, num_new=1024, budget=512)
    assert hybrid.blocks_per_request == [65] * 5 + [512]
    assert (hybrid.bytes_per_request, full.bytes_per_request) == ((512 + 5 * 65) * 98304, 6 * 512 * 98304)
    assert hybrid.most_at_a_time == hybrid.finished == 25
    assert full.most_at_a_time == full.finished == 7
    assert hybrid.preemptions == full.preemptions == 0
    assert hybrid.most_in_decode == [33] * 5 + [512]
