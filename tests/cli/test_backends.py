"""`octavo backends`: which attention backends could serve a model here."""

import json

import pytest
from fake_packages import BACKEND, install

import octavo
from octavo.cli.app import run

HEAD = "full_attention (layers 0-1)"
OWN = f"octavo {octavo.__version__}"


@pytest.fixture
def packages(site):
    sources = {
        "able": BACKEND,
        "broken": "raise OSError('no driver')",
        "choosy": f"from pydantic import BaseModel\n{BACKEND}\n    class Options(BaseModel):\n        k: int\n",
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


REASONS = {
    "able": [],
    "broken": [
        "The attention backend broken (broken_module:Backend, from broken-package 1.0) cannot be imported: OSError: no "
        "driver."
    ],
    "choosy": [],
    "odd": [
        "The attention backend odd (odd_module:Backend, from odd-package 1.0) answers cannot_serve with 'No CPU.'; it "
        "must be a list of sentences, empty when it can serve."
    ],
    "unable": ["No CPU.", "No float32."],
}


def test_each_installed_backend_serves_or_says_every_reason_why_not(packages, tiny_folder, capsys):
    assert run(["backends", str(tiny_folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tiny_folder} on cpu in float32, model class llama ({OWN}), by default; 'auto': model_type is 'llama'",
        HEAD,
        f"  torch_sdpa ({OWN}) serves",
        *(
            f"  {name} ({name}-package 1.0) " + (f"cannot serve: {' '.join(reasons)}" if reasons else "serves")
            for name, reasons in REASONS.items()
        ),
    ]


def test_a_program_gets_the_same(packages, tiny_folder, capsys):
    assert run(["backends", "--model", str(tiny_folder), "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)
    assert group == {
        "kind": "full_attention",
        "layers": [0, 1],
        "backends": [
            {"name": "torch_sdpa", "package": "octavo", "version": octavo.__version__, "serves": True, "reasons": []},
            *(
                {"name": name, "package": f"{name}-package", "version": "1.0", "serves": not why, "reasons": why}
                for name, why in REASONS.items()
            ),
        ],
    }


def test_the_settings_count_as_for_an_engine(packages, tiny_folder, capsys):
    assert run(["backends", str(tiny_folder), "--dtype", "bfloat16", "--model-impl", "octavo:qwen2"]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head == f"{tiny_folder} on cpu in bfloat16, model class qwen2 ({OWN}), by flag --model-impl"


def test_no_weight_is_read(tiny_folder, capsys, monkeypatch):
    from octavo.models.safetensors_checkpoint import SafetensorsCheckpoint

    monkeypatch.setattr(SafetensorsCheckpoint, "tensor", None)
    assert run(["backends", str(tiny_folder)]) == 0
    assert capsys.readouterr().out.splitlines()[2] == f"  torch_sdpa ({OWN}) serves"


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
