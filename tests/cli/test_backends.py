"""`octavo backends`: which attention backends could serve a model here."""

import json

import pytest
from fake_packages import BACKEND, install

import octavo
from octavo.cli.app import run
from octavo.config import EngineConfig
from octavo.errors import PluginUnsuitable
from octavo.plugins.registry import scan
from octavo.selection.select import select
from octavo.testing import tiny_models

AUTO = "by default; 'auto' takes the first of Octavo's own that can serve"
HEAD = "full_attention (layers 0-1)"
OWN = f"octavo {octavo.__version__}"


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """Whether Triton's is on differs from machine to machine, and with it whether triton could serve on a CPU."""
    monkeypatch.setattr(
        "octavo.attention_backends.triton.backend.TritonBackend.cannot_serve",
        classmethod(lambda cls, spec: ["No interpreter."]),
    )


@pytest.fixture
def packages(site):
    sources = {
        "able": BACKEND,
        "broken": "raise OSError('no driver')",
        "choosy": (
            f"from pydantic import BaseModel\n{BACKEND}\n    class Options(BaseModel):\n        k: int\n"
            "    def __init__(self, spec, *, options): super().__init__(spec)\n"
        ),
        "dicty": f"{BACKEND}\n    Options = dict\n",
        "unable": (
            f"{BACKEND}\n    @classmethod\n"
            "    def cannot_serve(cls, spec): return ['No CPU.', 'No ' + spec.dtype + '.']\n"
        ),
        "odd": f"{BACKEND}\n    @classmethod\n    def cannot_serve(cls, spec): return 'No CPU.'\n",
    }
    for name, source in sources.items():
        entries = f"[octavo.attention_backends]\n{name} = {name}_module:Backend\n"
        install(site, f"{name}-package", entries, **{f"{name}_module": source})
    return site


# Of Octavo's own, in the order of their names, and of packages.
OWN_REASONS = {
    "flash_attn": [
        "FlashAttention needs an NVIDIA GPU that torch can use, and the device is 'cpu'.",
        "FlashAttention computes in float16 and bfloat16, and dtype is 'float32'; set one of them.",
    ],
    "torch_sdpa": [],
    "triton": ["No interpreter."],
}
REASONS = {
    "able": [],
    "broken": [
        "The attention backend broken (broken_module:Backend, from broken-package 1.0) cannot be imported: OSError: no "
        "driver."
    ],
    "choosy": [],
    "dicty": [
        "The attention backend dicty (dicty_module:Backend, from dicty-package 1.0) has Options that are not a "
        "pydantic model."
    ],
    "odd": [
        "The attention backend odd (odd_module:Backend, from odd-package 1.0) answers cannot_serve with 'No CPU.'; it "
        "must be a list of sentences, empty when it can serve."
    ],
    "unable": ["No CPU.", "No float32."],
}


def test_each_installed_backend_serves_or_says_every_reason_why_not(packages, tiny_folder, capsys):
    assert run(["backends", str(tiny_folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tiny_folder} on cpu in float32, KV cache in float32, model class llama ({OWN}), by default; 'auto': "
        "model_type is 'llama'",
        HEAD,
        *(
            f"  {name} ({origin}) " + (f"cannot serve: {' '.join(reasons)}" if reasons else "serves")
            for name, origin, reasons in [
                *((name, OWN, reasons) for name, reasons in OWN_REASONS.items()),
                *((name, f"{name}-package 1.0", reasons) for name, reasons in REASONS.items()),
            ]
        ),
        f"  chosen: torch_sdpa, {AUTO}",
    ]


def test_a_program_gets_the_same(packages, tiny_folder, capsys):
    assert run(["backends", "--model", str(tiny_folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (group,) = found.pop("groups")
    assert found == {
        "model": str(tiny_folder),
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "model_class": "llama",
    }
    assert group == {
        "kind": "full_attention",
        "layers": [0, 1],
        "chosen": "torch_sdpa",
        "because": AUTO,
        "refusal": None,
        "backends": [
            *(
                {"name": name, "package": "octavo", "version": octavo.__version__, "serves": not why, "reasons": why}
                for name, why in OWN_REASONS.items()
            ),
            *(
                {"name": name, "package": f"{name}-package", "version": "1.0", "serves": not why, "reasons": why}
                for name, why in REASONS.items()
            ),
        ],
    }


def test_groups_of_which_there_is_the_same_to_say_are_one_entry(tmp_path, capsys):
    # Beside one layer without a window, each of the six with one is a group.
    folder = tiny_models.tiny_gemma3(tmp_path)
    assert len(select(EngineConfig.from_flat(model=str(folder)), scan()).groups) == 7
    assert run(["backends", str(folder)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines()[1:] if not line.startswith("  ")] == [
        "sliding_window (layers 0-4, 6)",
        "full_attention (layer 5)",
    ]
    assert run(["backends", str(folder), "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert [(group["kind"], group["layers"]) for group in groups] == [
        ("sliding_window", [0, 1, 2, 3, 4, 6]),
        ("full_attention", [5]),
    ]


# -- which one is chosen ----------------------------------------------------------------------------------------


def chosen(capsys, *arguments, status=0):
    """Return what is said of the choice, as a program gets it and as the last line."""
    assert run(["backends", *arguments, "--json"]) == status
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert run(["backends", *arguments]) == status
    last = capsys.readouterr().out.splitlines()[-1]
    return (group["chosen"], group["because"], group["refusal"]), last


def test_the_one_that_is_named_is_chosen_and_where_it_was_named_is_said(packages, tiny_folder, tmp_path, capsys):
    assert chosen(capsys, str(tiny_folder), "--attention-backend", "able") == (
        ("able", "by flag --attention-backend", None),
        "  chosen: able, by flag --attention-backend",
    )
    file = tmp_path / "octavo.toml"
    file.write_text('attention_backends.full_attention = { name = "choosy", options = { k = 1 } }\n')
    arguments = [str(tiny_folder), "--config", str(file), "--attention-backend", "able"]
    assert chosen(capsys, *arguments) == (("choosy", f"by {file}", None), f"  chosen: choosy, by {file}")


def test_one_that_is_named_and_cannot_serve_is_refused_as_by_an_engine_and_the_status_is_1(
    packages, tiny_folder, capsys
):
    sentence = (
        "The attention backend unable (unable_module:Backend, from unable-package 1.0) cannot serve this model here: "
        "No CPU. No float32. Installed ones that could: torch_sdpa, able-package:able, choosy-package:choosy."
    )
    assert chosen(capsys, str(tiny_folder), "--attention-backend", "unable", status=1) == (
        (None, None, sentence),
        f"  refused: {sentence}",
    )
    with pytest.raises(PluginUnsuitable) as caught:
        select(EngineConfig.from_flat(model=str(tiny_folder), attention_backend="unable"), scan())
    assert str(caught.value) == sentence


def test_what_is_said_of_the_one_that_is_named_goes_by_its_options(site, tiny_folder, capsys):
    source = (
        f"from pydantic import BaseModel\n{BACKEND}\n    class Options(BaseModel):\n        k: int = 0\n"
        "    def __init__(self, spec, *, options): super().__init__(spec)\n"
        "    @classmethod\n    def cannot_serve(cls, spec, options=None):\n"
        "        return [] if options and options.k else ['No k.']\n"
    )
    install(site, "picky-package", "[octavo.attention_backends]\npicky = picky_module:Backend\n", picky_module=source)
    assert run(["backends", str(tiny_folder)]) == 0
    assert "  picky (picky-package 1.0) cannot serve: No k." in capsys.readouterr().out.splitlines()
    assert run(["backends", str(tiny_folder), "--attention-backend", '{ name = "picky", options = { k = 1 } }']) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "  picky (picky-package 1.0) serves" in printed
    assert printed[-1] == "  chosen: picky, by flag --attention-backend"


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("torch_sdpaa", "No attention backend is called 'torch_sdpaa'. Did you mean 'torch_sdpa'? Installed: "),
        ("broken", REASONS["broken"][0].removesuffix(".")),
        ("dicty", REASONS["dicty"][0]),
        ("odd", REASONS["odd"][0]),
        (
            "choosy",
            "The option 'k' of the attention backend choosy (choosy_module:Backend, from choosy-package 1.0) is "
            "missing, and has no default.",
        ),
    ],
)
def test_one_that_is_named_and_cannot_be_had_is_one_line_and_the_status_2(
    packages, tiny_folder, capsys, name, sentence, flags
):
    assert run(["backends", str(tiny_folder), "--attention-backend", name, *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"octavo: {sentence}")
    assert shown.err.count("\n") == 1


def test_the_settings_count_as_for_an_engine(packages, tiny_folder, capsys):
    assert run(["backends", str(tiny_folder), "--dtype", "bfloat16", "--model-impl", "octavo:qwen2"]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head == (
        f"{tiny_folder} on cpu in bfloat16, KV cache in bfloat16, model class qwen2 ({OWN}), by flag --model-impl"
    )


def test_the_format_of_the_kv_cache_is_the_one_that_backends_are_asked_about(tiny_folder, capsys):
    arguments = ["backends", str(tiny_folder), "--kv-cache-dtype", "int8"]
    assert run(arguments) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head.startswith(f"{tiny_folder} on cpu in float32, KV cache in int8_per_token_head, model class llama ")
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache_dtype"] == "int8_per_token_head"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--attention-backends", "window=torch_sdpa"], "attention_backends chooses 'torch_sdpa' for the kind "),
        (["--kv-managers", "window=full_attention"], "kv_managers chooses 'full_attention' for the kind "),
        (["--kv-managers", "full_attention=mine"], "No KV-cache manager is called 'mine'. "),
        (["--hash-function", "sha265"], "No hash function is called 'sha265'. Did you mean 'sha256'? "),
        (["--request-queue", "fcsf"], "No request queue is called 'fcsf'. Did you mean 'fcfs'? "),
        (["--hooks", "mine"], "No observer is called 'mine'. "),
    ],
)
def test_a_choice_that_an_engine_refuses_is_refused_with_the_same_sentence(tiny_folder, capsys, flags, sentence):
    assert run(["generate", "a", "--model", str(tiny_folder), *flags]) == 2
    by_engine = capsys.readouterr()
    assert by_engine.err.startswith(f"octavo: {sentence}")
    assert run(["backends", str(tiny_folder), *flags]) == 2
    assert capsys.readouterr() == by_engine


# -- another machine --------------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_a_device_that_is_not_here_can_be_asked_about(packages, no_gpu, tiny_folder, capsys):
    assert run(["backends", str(tiny_folder), "--device", "cuda", "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tiny_folder} on cuda in bfloat16, KV cache in bfloat16, model class llama ")
    assert f"  torch_sdpa ({OWN}) serves" in lines
    assert "  unable (unable-package 1.0) cannot serve: No CPU. No bfloat16." in lines
    (flash,) = [line for line in lines if line.startswith("  flash_attn")]
    assert "FlashAttention needs an NVIDIA GPU that torch can use, and the device is 'cuda'." in flash


def test_of_a_model_a_config_alone_is_enough(no_gpu, tiny_folder, tmp_path, capsys):
    folder = tmp_path / "config alone"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text((tiny_folder / "config.json").read_text())
    for model in (folder, file):
        assert run(["backends", str(model), "--device", "cuda:1", "--dtype", "float16", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [found[key] for key in ("device", "dtype", "kv_cache_dtype")] == ["cuda:1", "float16", "float16"]
        assert [group["chosen"] for group in found["groups"]] == ["torch_sdpa"]


def test_no_weight_is_read(tiny_folder, capsys, monkeypatch):
    from octavo.models.safetensors_checkpoint import SafetensorsCheckpoint

    monkeypatch.setattr(SafetensorsCheckpoint, "tensor", None)
    assert run(["backends", str(tiny_folder)]) == 0
    assert f"  torch_sdpa ({OWN}) serves" in capsys.readouterr().out.splitlines()


def test_a_model_that_is_named_twice_is_refused(tiny_folder, capsys):
    assert run(["backends", str(tiny_folder), "--model", "other"]) == 2
    assert capsys.readouterr().err == f"octavo: The model is named twice: '{tiny_folder}' and 'other'.\n"


def test_what_is_wrong_is_one_line(tiny_folder, capsys):
    assert run(["backends", str(tiny_folder), "--device", "gpu"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("octavo: device is 'gpu', which torch does not know: ")
    assert shown.err.count("\n") == 1
    assert run(["backends", str(tiny_folder / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_variable_that_has_no_effect_is_named(tiny_folder, capsys, monkeypatch, caplog):
    monkeypatch.setenv("OCTAVO_ZZZ", "1")
    assert run(["backends", str(tiny_folder)]) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "The environment variable OCTAVO_ZZZ has no effect: Octavo takes no settings from there; unset it."
    ]
