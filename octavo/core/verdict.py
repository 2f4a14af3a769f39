"""What the KV cache answers when it is asked for room or for a reset: values, for a refusal is nothing exceptional."""

import enum
from dataclasses import dataclass


class Fit(enum.Enum):
    """Whether a request can be given what it asks for."""

    FITS = "fits"
    WAIT_STEP = "wait for the next step"
    WAIT_MEMORY = "wait for memory"
    NEVER = "larger than the whole pool"


@dataclass(frozen=True)
class Verdict:
    """A fit, and the numbers behind it as a sentence."""

    fit: Fit
    reason: str = ""

    def __bool__(self) -> bool:
        return self.fit is Fit.FITS


@dataclass(frozen=True)
class ResetResult:
    """Whether a reset was done, and if not why. True exactly when it was done.

    Attributes:
        done: Whether nothing that was cached before can be found any more.
        reason: Why it was not done.
        num_preempted: Running requests that were preempted for it, and will be computed anew.
    """

    done: bool
    reason: str = ""
    num_preempted: int = 0

    def __bool__(self) -> bool:
        return self.done


FITS = Verdict(Fit.FITS)
