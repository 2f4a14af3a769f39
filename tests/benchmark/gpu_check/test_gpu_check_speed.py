"""How speed is measured: who is asked, that outputs are compared, and what a time is said to mean."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_check import contenders, speed
from gpu_check.clocks import Clock, GPUClock, WallClock, alternate
from gpu_check.contenders import BackendContender, Data, DenseFlashAttention, NotServedError, WrongError, peers_for
from gpu_check.shapes import Shape, decode_shapes, prefill_shapes
from gpu_check.sizes import SMALL

from octavo.core.interfaces.attention import AttentionBackend
from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.registry import scan
from octavo.testing import installed

DECODE = decode_shapes(SMALL, "cpu")
PREFILL = prefill_shapes(SMALL, "cpu")
LIMITS = {"copy_bytes_per_s": 4e9, "matrix_flop_per_s": 1e12}


class Ticking(Clock):
    """A clock on which each work takes as long as its name was given."""

    def __init__(self, **seconds):
        self.given = {name: iter(times) for name, times in seconds.items()}

    def seconds(self, work):
        return next(self.given[work()])

    def wait(self):
        pass


def reference():
    return scan().load(ATTENTION_BACKENDS, "torch_sdpa")


# -- clocks -----------------------------------------------------------------------------------------------------------


def test_works_take_turns_and_the_median_of_each_counts():
    turns = []
    clock = Ticking(a=[9.0, 1.0, 2.0], b=[5.0, 5.0, 7.0])
    works = {"a": lambda: "a", "b": lambda: "b"}
    assert alternate(clock, works, 3, 1000.0, turns.append) == {"a": 2.0, "b": 5.0}
    assert turns == ["a", "b"] * 3


def test_no_round_is_begun_when_the_time_is_over_but_a_median_needs_three():
    turns = []
    alternate(Ticking(a=[1.0] * 9), {"a": lambda: "a"}, 9, 0.0, turns.append)
    assert len(turns) == 3


def test_a_wall_clock_takes_the_time_of_the_call(monkeypatch):
    now = iter([10.0, 12.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    assert WallClock().seconds(lambda: None) == 2.5


def test_a_gpu_clock_times_the_kernels_between_two_events(monkeypatch):
    order = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            order.append("event")

        def synchronize(self):
            order.append("wait")

        def elapsed_time(self, end):
            return 12.5

    class Buffer:
        """Can be read and not written: lines that were written go back to memory during the measurement."""

        def __init__(self, size, dtype, device):
            assert size * dtype.itemsize == 512 << 20

        def max(self):
            order.append("read")

    monkeypatch.setattr(torch, "empty", Buffer)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("busy"), raising=False)
    clock = GPUClock("cuda:0")
    # In milliseconds, as CUDA has it.
    assert clock.seconds(lambda: order.append("work")) == 0.0125
    assert order == ["read", "busy", "event", "work", "event", "wait"]
    # A torch without it is served too.
    monkeypatch.delattr(torch.cuda, "_sleep")
    assert clock.seconds(lambda: None) == 0.0125


# -- contenders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*DECODE, *PREFILL], ids=lambda shape: shape.name)
def test_the_reference_computes_every_shape_as_defined(shape):
    data = Data(shape)
    prepared = BackendContender("torch_sdpa").prepare(data)
    # A unit in the last place of bfloat16 is 2**-8 of a number; a few add up.
    assert data.check(prepared.attend()) < 4 * 2**-8


@pytest.mark.parametrize("shape", [DECODE[0], PREFILL[0], PREFILL[1]], ids=lambda shape: shape.name)
def test_torchs_flash_attention_computes_the_same(shape):
    data = Data(shape)
    data.check(DenseFlashAttention().prepare(data).attend())


@pytest.mark.parametrize("shape", [DECODE[0], PREFILL[0]], ids=lambda shape: shape.name)
@pytest.mark.parametrize("factor", [0.9, 1.1, float("nan")])
def test_an_output_that_is_wrong_is_noticed(shape, factor):
    data = Data(shape)
    right = BackendContender("torch_sdpa").prepare(data).attend()
    with pytest.raises(WrongError, match="the output differs from attention by its definition: an error of"):
        data.check(right * factor)


def test_one_wrong_row_is_noticed_where_it_is_the_last_one():
    data = Data(DECODE[0])
    output = BackendContender("torch_sdpa").prepare(data).attend()
    output[-1] = output[0]
    with pytest.raises(WrongError):
        data.check(output)


def test_a_mask_that_is_off_by_one_is_noticed():
    shape = PREFILL[2]
    data, off = Data(shape), replace(shape, spec=replace(shape.spec, window=shape.spec.window + 1))
    with pytest.raises(WrongError):
        data.check(BackendContender("torch_sdpa").prepare(Data(off)).attend())


def test_an_output_of_another_shape_is_noticed():
    data = Data(DECODE[0])
    with pytest.raises(WrongError, match=r"the output has shape \(2, 2, 16\)\."):
        data.check(torch.zeros(2, 2, 16))


def test_pages_lie_scattered_and_no_two_tokens_share_a_slot():
    data = Data(DECODE[0])
    slots = data.slots.numpy()
    assert len(np.unique(slots)) == len(slots) == 2 * 40
    # Block 0 is nobody's.
    assert slots.min() >= 16
    assert (np.diff(data.batch.block_table_host[0]) != 1).any()
    # The new token of each row is its last one.
    assert data.batch.slots.tolist() == [slots[39], slots[79]]
    assert data.batch.num_decode_rows == 2


def test_a_backend_that_does_not_serve_a_shape_is_not_built():
    class Choosy(reference()):
        contract_version = 1

        @classmethod
        def cannot_serve(cls, spec):
            return ["No.", "Not at all."]

    with (
        installed({"octavo.attention_backends": {"choosy": Choosy}}),
        pytest.raises(NotServedError, match=r"^No\. Not at all\.$"),
    ):
        BackendContender("choosy").prepare(Data(DECODE[0]))


def test_torchs_flash_attention_is_asked_where_it_has_such_a_thing():
    grouped, latent, quantised = DECODE[:3]
    names = ["torch varlen_attn, paged", "torch varlen_attn, contiguous", "torch SDPA flash, contiguous"]
    assert [peer.name for peer in peers_for(grouped)] == names
    assert peers_for(latent) == peers_for(quantised) == []


def varlen_attn_of_2_13(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    return dict(locals())


def varlen_attn_of_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    return dict(locals())


@pytest.mark.parametrize(
    ("shape", "bounds"), [(DECODE[0], (-1, -1)), (DECODE[-1], (15, 0)), (PREFILL[0], (-1, 0)), (PREFILL[2], (15, 0))]
)
def test_varlen_attention_gets_rows_back_to_back(monkeypatch, shape, bounds):
    monkeypatch.setattr(contenders, "_varlen_attn", lambda: varlen_attn_of_2_13)
    data = Data(shape)
    got = contenders.VarlenAttention().prepare(data).attend()
    num_queries, context_len = shape.rows[0]
    assert got["window_size"] == bounds
    assert got["enable_gqa"] is True
    assert got["cu_seq_q"].tolist() == [num_queries * row for row in range(len(shape.rows) + 1)]
    assert got["cu_seq_k"].tolist() == [context_len * row for row in range(len(shape.rows) + 1)]
    assert (got["max_q"], got["max_k"]) == (num_queries, context_len)
    assert got["key"] is data.keys
    assert got["block_table"] is None


def test_paged_varlen_attention_finds_each_token_in_its_slot(monkeypatch):
    monkeypatch.setattr(contenders, "_varlen_attn", lambda: varlen_attn_of_2_13)
    data = Data(DECODE[0])
    got = contenders.PagedVarlenAttention().prepare(data).attend()
    assert got["cu_seq_k"] is None
    assert got["seqused_k"].tolist() == [40, 40]
    # Row 1's position 35, through the table.
    block = got["block_table"][1, 35 // 16]
    assert torch.equal(got["value"][block, 35 % 16], data.values[40 + 35])


@pytest.mark.parametrize(
    ("peer", "lacking"),
    [(contenders.VarlenAttention(), "no enable_gqa"), (contenders.PagedVarlenAttention(), "no enable_gqa")],
)
def test_an_older_torch_is_told_what_it_lacks(monkeypatch, peer, lacking):
    monkeypatch.setattr(contenders, "_varlen_attn", lambda: varlen_attn_of_2_11)
    with pytest.raises(NotServedError) as caught:
        peer.prepare(Data(DECODE[0]))
    assert str(caught.value) == f"varlen_attn of torch {torch.__version__} has {lacking}."


# -- lines ------------------------------------------------------------------------------------------------------------


class Peer(contenders.Contender):
    name, is_peer = "peer", True

    def prepare(self, data):
        raise NotImplementedError


def test_a_decode_time_is_a_share_of_the_copy_bandwidth():
    shape = Shape("it", ((1, 1000),), DECODE[0].spec)
    # Two heads of 16 numbers, keys and values, and queries and outputs of four heads, in 2 bytes.
    assert shape.read_bytes == 1000 * 2 * 2 * 16 * 2 + 2 * 4 * 16 * 2 == 128_256
    line = speed.line_of("decode", shape, BackendContender("triton"), 1e-4, ("peer", 2.5e-4), LIMITS, {}, True)
    assert line.text == (
        "0.100 ms, 1.28 GB/s, 2.56 GFLOP/s, 0.32 of the copy bandwidth, 0.00 of the matrix rate, "
        "2.50 times as fast as peer"
    )
    assert line.figures["share_of_copy_bytes_per_s"] == pytest.approx(128_256 / 1e-4 / 4e9)
    assert line.figures["share_of_matrix_flop_per_s"] == pytest.approx(256_000 / 1e-4 / 1e12)
    assert str(line.target) == "missed: 0.32 of the copy bandwidth, wanted 0.8"


def test_a_prefill_time_is_compared_with_torchs_flash_attention():
    line = speed.line_of("prefill", PREFILL[0], BackendContender("triton"), 2e-4, ("peer", 1.5e-4), LIMITS, {}, True)
    assert str(line.target) == "met: 0.75 of the speed of torch's FlashAttention, wanted 0.6"
    assert (line.figures["peer"], line.figures["ratio_to_peer"]) == ("peer", pytest.approx(0.75))


def test_without_a_figure_no_target_is_spoken_of():
    line = speed.line_of("decode", DECODE[0], BackendContender("triton"), 1e-4, None, {}, {}, True)
    assert line.target is None
    assert "no share of the copy bandwidth, which was not measured" in line.text
    assert line.text.endswith("none of torch's FlashAttention ran beside it")
    assert speed.line_of("prefill", PREFILL[0], BackendContender("triton"), 1e-4, None, LIMITS, {}, True).target is None


def test_only_the_triton_backend_has_targets():
    for contender in (BackendContender("torch_sdpa"), Peer()):
        assert speed.line_of("decode", DECODE[0], contender, 1e-4, None, LIMITS, {}, True).target is None
    assert speed.line_of("decode", DECODE[0], BackendContender("triton"), 1e-4, None, LIMITS, {}, False).target is None


def test_the_fastest_peer_is_the_one_to_compare_with():
    fast, slow, own = Peer(), Peer(), BackendContender("triton")
    fast.name, slow.name = "fast", "slow"
    assert speed.fastest_peer([own, slow, fast], {"triton": 1.0, "slow": 3.0, "fast": 2.0}) == ("fast", 2.0)
    assert speed.fastest_peer([own, slow], {"triton": 1.0}) is None


class Crooked:
    def attend(self, *args, **kwargs):
        return super().attend(*args, **kwargs) * 1.2


class Raising:
    def attend(self, *args, **kwargs):
        raise RuntimeError("out of luck\nand more")


def test_a_shape_has_a_line_for_each_whatever_becomes_of_the_others(told):
    backends = {
        name: type(name, (mixin, reference()), {"contract_version": 1})
        for name, mixin in (("crooked", Crooked), ("raising", Raising))
    }
    with installed({"octavo.attention_backends": backends}):
        speed.measure_shape(
            "decode",
            DECODE[0],
            ["crooked", "raising", "torch_sdpa", "absent"],
            WallClock(),
            LIMITS,
            3,
            False,
            ["absent"],
        )
    lines = {line.what.removeprefix(f"{DECODE[0].name}, "): line for line in told()}
    assert [(what, line.status) for what, line in lines.items()] == [
        ("crooked", "failed"),
        ("raising", "failed"),
        ("torch varlen_attn, paged", "not run"),
        ("torch varlen_attn, contiguous", "not run"),
        ("torch_sdpa", "measured"),
        ("torch SDPA flash, contiguous", "measured"),
    ]
    assert lines["crooked"].text.startswith("WrongError: the output differs from attention by its definition")
    assert lines["raising"].text == "RuntimeError: out of luck"
    assert lines["torch_sdpa"].figures["seconds"] > 0


class Talkative(Peer):
    def prepare(self, data):
        raise NotImplementedError("Could not run 'aten::x' here. It is there for [Meta, Python, Functionalize].")


def test_of_what_torch_does_not_serve_one_sentence_is_said(told, monkeypatch):
    monkeypatch.setattr(speed, "peers_for", lambda shape: [Talkative()])
    speed.measure_shape("decode", DECODE[0], [], WallClock(), LIMITS, 3, False)
    assert [(line.status, line.text) for line in told()] == [
        ("not run", "NotImplementedError: Could not run 'aten::x' here.")
    ]


@pytest.mark.parametrize(
    ("part", "shape", "limits", "reason"),
    [
        (
            "decode",
            DECODE[0],
            {},
            "no copy bandwidth was measured, of which 0.8 are wanted; the part `limits` does that",
        ),
        ("prefill", PREFILL[0], LIMITS, "none of torch's FlashAttention ran beside it, of whose speed 0.6 are wanted"),
    ],
)
def test_a_target_that_could_not_be_judged_was_not_run(told, monkeypatch, part, shape, limits, reason):
    monkeypatch.setattr(speed, "TARGETED_BACKEND", "torch_sdpa")
    monkeypatch.setattr(speed, "peers_for", lambda shape: [])
    speed.measure_shape(part, shape, ["torch_sdpa"], WallClock(), limits, 3, has_target=True)
    measured, target = told()
    assert (measured.what, measured.status) == (f"{shape.name}, torch_sdpa", "measured")
    assert (target.what, target.status, target.text) == (f"{shape.name}, torch_sdpa, target", "not run", reason)


def test_a_target_that_was_judged_stands_beside_its_figure(told, monkeypatch):
    monkeypatch.setattr(speed, "TARGETED_BACKEND", "torch_sdpa")
    monkeypatch.setattr(speed, "peers_for", lambda shape: [])
    speed.measure_shape("decode", DECODE[0], ["torch_sdpa"], WallClock(), LIMITS, 3, has_target=True)
    (line,) = told()
    assert line.target is not None


def test_the_step_under_way_is_known_while_it_is_measured(reported):
    speed.measure_shape("decode", DECODE[1], ["torch_sdpa"], WallClock(), LIMITS, 3, False)
    steps = [event["step"] for event in reported() if event["event"] == "step"]
    # Once to prepare, three times to be timed.
    assert steps == ["torch_sdpa"] * 4 + [None]


def test_targets_are_for_a_gpu_and_full_sizes():
    assert issubclass(reference(), AttentionBackend)
    cases = speed.cases_of("prefill", SMALL, "cpu", ["torch_sdpa"], LIMITS)
    assert list(cases) == [shape.name for shape in PREFILL]
    assert [case.args[1] for case in cases.values()] == [False, False, False]
