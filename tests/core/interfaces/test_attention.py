"""What every `AttentionSpec` promises before a backend sees it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from octavo.core.interfaces.attention import AttentionSpec

PLAIN = AttentionSpec(
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=16,
    head_dim_v=16,
    scale=0.25,
    block_size=7,
    dtype="float32",
    kv_dtype="float32",
    device="cpu",
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_query_heads": 7},
            "num_query_heads is 7, which is not a multiple of num_kv_heads, 2; every KV head must serve equally many "
            "query heads.",
        ),
        ({"num_query_heads": 0}, "num_query_heads is 0; it must be at least 1."),
        ({"num_kv_heads": 0}, "num_kv_heads is 0; it must be at least 1."),
        ({"head_dim": -16}, "head_dim is -16; it must be at least 1."),
        ({"head_dim_v": 0}, "head_dim_v is 0; it must be at least 1."),
        ({"block_size": 0}, "block_size is 0; it must be at least 1."),
        (
            {"value_is_key_prefix": True},
            "num_kv_heads is 2, and value_is_key_prefix needs 1; store one key a token, or turn value_is_key_prefix "
            "off.",
        ),
        (
            {"value_is_key_prefix": True, "num_kv_heads": 1, "head_dim_v": 17},
            "head_dim_v is 17, and with value_is_key_prefix it must be at most head_dim, 16.",
        ),
        ({"scale": float("nan")}, "scale is nan; it must be a finite number, such as head_dim**-0.5."),
        ({"scale": float("inf")}, "scale is inf; it must be a finite number, such as head_dim**-0.5."),
        ({"window": 0}, "window is 0; it must be at least 1, since every query sees itself, or None for all keys."),
        ({"chunk": -8}, "chunk is -8; it must be at least 1, since every query sees itself, or None for all keys."),
        ({"keep_first": -1}, "keep_first is -1; it must not be negative: 0 keeps none."),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; it must be finite and above 0, or None for no cap."),
        ({"soft_cap": -2.0}, "soft_cap is -2.0; it must be finite and above 0, or None for no cap."),
        ({"soft_cap": float("inf")}, "soft_cap is inf; it must be finite and above 0, or None for no cap."),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_numbers_that_make_no_sense_are_refused_with_the_way_out(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(PLAIN, **changes)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ValueError, match="must") as refusal:
        replace(PLAIN, num_query_heads=5, window=0, chunk=0, soft_cap=-1.0)
    for name in ("num_query_heads is 5", "window is 0", "chunk is 0", "soft_cap is -1.0"):
        assert name in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 1, "chunk": 1, "keep_first": 0},
        {"num_query_heads": 1, "num_kv_heads": 1, "head_dim": 1, "head_dim_v": 1, "block_size": 1},
        {"num_kv_heads": 1, "value_is_key_prefix": True},
        {"num_kv_heads": 1, "head_dim_v": 1, "value_is_key_prefix": True},
        {"scale": -0.5},
        {"scale": 1},
        {"dtype": "whatever the backend", "kv_dtype": "has to say", "device": "about it"},
    ],
    ids=str,
)
def test_what_a_backend_has_to_judge_is_let_through(changes: dict[str, object]) -> None:
    assert replace(PLAIN, **changes) is not PLAIN


def test_it_is_checked_without_torch() -> None:
    imports = "import sys; from octavo.core.interfaces.attention import AttentionSpec"
    code = f"{imports}; {PLAIN!r}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
