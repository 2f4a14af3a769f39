"""A GPU that a kernel has broken takes no more work from the same process, whatever it is."""

from __future__ import annotations

import os
import sys
import traceback

import torch

# The exit status of a process whose GPU takes no more work.
BROKEN_DEVICE = 70


def leave_if_broken(error: Exception) -> None:
    """End this process if the GPU takes no more work, so that a new one goes on without what broke it."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except Exception:
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(BROKEN_DEVICE)
