"""Engines against the reference: which difference is rounding, and which is a fault."""

import logging

import pytest
from gpu_check import engine
from gpu_check.engine import Agreement, Answer, Engines, Setup, compare, setups

from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.registry import scan
from octavo.testing import installed

# At each place token 5 is the best, and 6 and 7 are 0.25 and 3 nats below it.
LIKELY = {5: -0.5, 6: -0.75, 7: -3.5}
REFERENCE = Answer([[5, 5, 5], [5, 5]], [[LIKELY] * 3, [LIKELY] * 2])


@pytest.mark.parametrize(
    ("tokens", "num_equal", "regret"),
    [
        ([[5, 5, 5], [5, 5]], 5, 0.0),
        ([[5, 6, 5], [5, 5]], 3, 0.25),
        ([[6, 7, 7], [5, 7]], 1, 3.0),
        # One that the reference did not list is at least as far away as the last one that it did.
        ([[5, 5, 9], [5, 5]], 4, 3.0),
        # Ended early: no token at all is as wrong as can be.
        ([[5], [5, 5]], 3, float("inf")),
    ],
)
def test_the_first_difference_counts(tokens, num_equal, regret):
    assert compare(Answer(tokens, []), REFERENCE) == Agreement(num_equal, 5, regret)


def test_an_agreement_is_a_sentence():
    assert str(Agreement(5, 5, 0.0)) == "all 5 tokens are the reference's"
    assert str(Agreement(3, 5, 0.25)) == (
        "3 of 5 tokens before a first difference, where the reference had the other token 0.25 nats below its best"
    )


def test_half_precision_comes_first_and_quantised_caches_last():
    names = [setup.name for setup in setups(["triton", "torch_sdpa"])]
    assert names[:5] == [
        "triton, bfloat16",
        "torch_sdpa, bfloat16",
        "triton, float32",
        "torch_sdpa, float32",
        "triton, bfloat16, cache in fp8_e4m3",
    ]
    assert len(set(names)) == len(names)


def test_float32_may_differ_by_next_to_nothing():
    assert Setup("x", "float32").largest_regret < Setup("x", "bfloat16").largest_regret


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return Engines("cpu", engine.find_model(tmp_path_factory.mktemp("model"), is_small=True), max_tokens=6)


def test_the_reference_agrees_with_itself(engines, told):
    engines.try_setup(Setup("torch_sdpa", "float32"))
    (line,) = told()
    assert (line.what, line.status) == ("torch_sdpa, float32, eager", "passed")
    assert line.text == "all 18 tokens are the reference's"
    assert line.figures == {"num_equal": 18, "num_tokens": 18, "regret": 0.0, "largest_regret": 0.01}


def test_a_backend_that_is_wrong_says_something_else(engines, told):
    class Shy(scan().load(ATTENTION_BACKENDS, "torch_sdpa")):
        contract_version = 1

        def attend(self, *args, **kwargs):
            return super().attend(*args, **kwargs) * 0.1

    with installed({"octavo.attention_backends": {"shy": Shy}}):
        engines.try_setup(Setup("shy", "float32"))
    (line,) = told()
    assert line.status == "failed"
    assert line.text.endswith("; 0.01 are allowed")


def test_an_engine_that_cannot_be_made_was_not_run(engines, told):
    engines.try_setup(Setup("no_such_thing", "float32"))
    (line,) = told()
    assert line.status == "not run"
    assert line.text.startswith("PluginNotFound: No attention backend is called 'no_such_thing'.")


def test_a_step_that_a_process_ended_over_is_left_out(engines, told):
    engines.try_setup(Setup("torch_sdpa", "float32"), without=["eager"])
    assert told() == []


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Returns engines whose answers, and what they say about graphs, are given."""

    def make(eager, graphs, said):
        def answer(enforce_eager=None, **rest):
            if enforce_eager is not None:
                logging.getLogger("octavo.core.cuda_graphs").info("%s", "not asked for" if enforce_eager else said)
            return {None: REFERENCE, True: eager, False: graphs}[enforce_eager]

        engines = Engines("cuda:0")
        monkeypatch.setattr(engines, "answer", answer)
        monkeypatch.setattr(engine, "field_sections", lambda: {"enforce_eager": None})
        return engines

    return make


def test_a_difference_between_graphs_and_eager_steps_is_said_and_the_reference_decides(on_a_gpu, reported, told):
    engines = on_a_gpu(REFERENCE, Answer([[5, 5, 6], [5, 5]], []), "captured 4 CUDA graphs for decode steps")
    engines.try_setup(Setup("triton", "bfloat16"))
    assert [(line.what, line.status, line.text) for line in told()] == [
        ("triton, bfloat16, eager", "passed", "all 5 tokens are the reference's"),
        (
            "triton, bfloat16, CUDA graphs",
            "passed",
            "4 of 5 tokens before a first difference, where the reference had the other token 0.25 nats below its best",
        ),
        (
            "triton, bfloat16, CUDA graphs against eager",
            "measured",
            "4 of 5 tokens before a first difference; sums have another order there",
        ),
    ]
    steps = [event["step"] for event in reported() if event["event"] == "step"]
    assert steps == ["torch_sdpa on the CPU", "eager", "CUDA graphs"]


def test_graphs_fail_where_their_tokens_are_less_likely_than_rounding_explains(on_a_gpu, told):
    engines = on_a_gpu(REFERENCE, Answer([[5, 5, 7], [5, 5]], []), "captured 4 CUDA graphs for decode steps")
    engines.try_setup(Setup("triton", "bfloat16"))
    assert [(line.what, line.status) for line in told()] == [
        ("triton, bfloat16, eager", "passed"),
        ("triton, bfloat16, CUDA graphs", "failed"),
        ("triton, bfloat16, CUDA graphs against eager", "measured"),
    ]


def test_equal_tokens_of_graphs_pass(on_a_gpu, told):
    on_a_gpu(REFERENCE, REFERENCE, "captured 4 CUDA graphs for decode steps").try_setup(Setup("triton", "float32"))
    assert [(line.status, line.text) for line in told()][2:] == [("passed", "the same 5 tokens")]


def test_tokens_that_came_without_a_graph_are_no_proof_of_graphs(on_a_gpu, told):
    said = "decode steps run without CUDA graphs: torch_sdpa cannot be captured."
    on_a_gpu(REFERENCE, REFERENCE, said).try_setup(Setup("torch_sdpa", "float32"))
    assert [(line.what, line.status, line.text) for line in told()] == [
        ("torch_sdpa, float32, eager", "passed", "all 5 tokens are the reference's"),
        ("torch_sdpa, float32, CUDA graphs", "not run", said),
    ]
