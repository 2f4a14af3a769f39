"""The contract of an attention backend, kept by the triton backend, on a CPU through Triton's interpreter.

The ordinary run tries every test with one ability or two, and every rule and format once. The whole suite is slow.
"""

from __future__ import annotations

import pytest
import torch

from octavo.testing import AttentionBackendSuite
from octavo.testing.attention.abilities import QUANTISED, RULES
from octavo.testing.attention.exercise import abilities_of

# What the ordinary run tries besides each test's first ability.
ORDINARY = {
    "test_output_and_lse_equal_the_definition": (
        *RULES,
        *QUANTISED,
        "bfloat16",
        "float16",
        "bfloat16_cache",
        "head_dim_7",
        "block_size_7",
        "heads_71_1",
    ),
    "test_slot_minus_one_writes_nothing": ("fp8_e4m3_per_token_head_cache",),
    "test_a_nan_among_the_keys_or_values_is_not_lost": tuple(QUANTISED),
    "test_gathered_keys_are_those_that_were_written": ("value_is_key_prefix+bfloat16",),
}
# Many steps, or many rows, even with one ability.
LONG = (
    "test_abilities_work_together",
    "test_two_groups_share_one_buffer",
    "test_many_rows_have_no_seam",
    "test_plans_of_many_groups_and_steps_do_not_mix",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TestTriton(AttentionBackendSuite):
    backend = "triton"
    device = DEVICE
    seeds = (0,)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        abilities = abilities_of(type(self), metafunc.function)
        if abilities is None:
            return
        name = metafunc.function.__name__
        chosen = dict.fromkeys((abilities[0], *ORDINARY.get(name, ())))
        marks = [pytest.mark.slow] if name in LONG else []
        metafunc.parametrize("ability", [pytest.param(ability, marks=marks) for ability in chosen])


@pytest.mark.slow
class TestTritonExhaustively(AttentionBackendSuite):
    """Every test with every ability. One KV head but where an ability has more: each takes programs of its own."""

    backend = "triton"
    device = DEVICE
    seeds = (0,)
    plain = {"num_query_heads": 3, "num_kv_heads": 1}
