"""The conformance tests of `can_capture`: what keeps the promise passes them, and each mistake is told in words."""

import pytest
import torch
from gather_backend import GatherBackend

from octavo.testing.attention.capture import CapturableOnly, CaptureFault, CaptureTests
from octavo.testing.attention.suite import AttentionBackendSuite, reproduce
from octavo.testing.attention.trial import Fault

REPEATED = "test_a_step_that_is_repeated_follows_the_numbers_in_its_tensors"
PADDED = "test_rows_that_fill_a_step_up_change_nothing"
WAITING = "test_nothing_waits_for_the_device"


class TestGatherBackend(CaptureTests):
    backend = GatherBackend
    pytest_generate_tests = AttentionBackendSuite.pytest_generate_tests


class ReadsTheHost(GatherBackend):
    def plan(self, batch):
        self.width = -(-int(batch.context_lens_host.max()) // self.spec.block_size)
        return super().plan(batch)


class KeepsThePlanOfASize(GatherBackend):
    def __init__(self, spec):
        super().__init__(spec)
        self.plans = {}

    def plan(self, batch):
        return self.plans.setdefault(batch.num_rows, super().plan(batch))


class SendsPaddingToTheNullBlock(GatherBackend):
    def write(self, key, value, kv_cache, slots):
        super().write(key, value, kv_cache, slots.clamp(min=0))


class WaitsForALength(GatherBackend):
    def plan(self, batch):
        self.longest = int(batch.context_lens.max())
        return super().plan(batch)


class PicksByMask(GatherBackend):
    def write(self, key, value, kv_cache, slots):
        is_stored = slots >= 0
        value = None if value is None else value[is_stored]
        super().write(key[is_stored], value, kv_cache, slots[is_stored])


@pytest.mark.parametrize(
    ("backend", "test", "complaint"),
    [
        (ReadsTheHost, REPEATED, "RuntimeError: context_lens_host was read in a step of decode rows"),
        (KeepsThePlanOfASize, REPEATED, "computed again as batch 1, the output differs from attention"),
        (SendsPaddingToTheNullBlock, PADDED, "a token whose slot is -1 was written to the null block."),
        (WaitsForALength, WAITING, "default waits for the device, which cannot be part of a CUDA graph."),
        (PicksByMask, WAITING, "has a mask as its index, and waits for how many it picks"),
    ],
)
def test_a_broken_promise_is_told(backend, test, complaint):
    with pytest.raises(Fault) as fault:
        reproduce(backend, "plain", test=test)
    assert complaint in str(fault.value)


def test_a_backend_that_promises_nothing_is_not_tried():
    class Plain(GatherBackend):
        can_capture = False

    with pytest.raises(pytest.skip.Exception, match=r"^Plain sets can_capture to False\.$"):
        reproduce(Plain, "plain", test=REPEATED)


@pytest.mark.parametrize(
    "compute",
    [
        lambda numbers: numbers[0].item(),
        lambda numbers: bool(numbers[0] > 0),
        lambda numbers: numbers.nonzero(),
        lambda numbers: numbers[numbers > 1],
        lambda numbers: torch.masked_select(numbers, numbers > 1),
        lambda numbers: numbers.index_put_((numbers > 1,), torch.zeros((), dtype=numbers.dtype)),
        lambda numbers: numbers.unique(),
        lambda numbers: numbers.bincount(),
        lambda numbers: torch.repeat_interleave(numbers),
        lambda numbers: numbers + torch.tensor([1, 2, 3]),
        lambda numbers: numbers.to("meta"),
        lambda numbers: torch.equal(numbers, numbers),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(compute):
    numbers = torch.arange(3)
    with CapturableOnly(), pytest.raises(CaptureFault, match="which cannot be part of a CUDA graph"):
        compute(numbers)


def test_what_depends_on_shapes_alone_is_let_through():
    numbers = torch.arange(3)
    with CapturableOnly():
        numbers[numbers.flip(0)] += 1
        numbers.masked_fill_(numbers > 2, 0)
        spread = torch.repeat_interleave(numbers, output_size=3) + torch.arange(3)
        padded = torch.zeros(8, dtype=torch.int64).index_copy_(0, spread.clamp(max=7), spread)
    assert padded.shape == (8,)
