"""What a command says when an answer broke off."""

import sys

import typer

from octavo.core.outputs import RequestOutput

# What a command exits with when there is no whole answer.
EXIT_BROKEN_OFF = 2

REASONS = {
    "non_finite_logits": "the logits are not finite numbers. The fault is in the weights, in the dtype, or in the "
    "attention backend; try --dtype float32 or --attention-backend torch_sdpa",
    "detokenizer_failed": "the tokenizer cannot make text of the tokens",
}


def exit_if_broken_off(output: RequestOutput | None) -> None:
    """As `say_if_broken_off`, and exit then."""
    if say_if_broken_off(output):
        raise typer.Exit(EXIT_BROKEN_OFF)


def say_if_broken_off(output: RequestOutput | None) -> bool:
    """Say on standard error why an answer ended with an error; return whether it did."""
    if output is None or output.outputs[0].finish_reason != "error":
        return False
    reason = str(output.outputs[0].stop_reason)
    print(f"octavo: the answer broke off: {REASONS.get(reason, reason)}.", file=sys.stderr)
    return True
