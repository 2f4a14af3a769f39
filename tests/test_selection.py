"""Which parts an engine is made of: what was chosen and why, and what is said when it cannot be."""

import importlib
import json
import logging
import sys

import pytest
from fake_packages import BACKEND, QUEUE, fresh_scan, install

import octavo
from octavo import EngineConfig, PluginChoice, SamplingParams
from octavo.assembly import build_engine
from octavo.cli.options import make_config
from octavo.errors import (
    CheckpointError,
    ConfigError,
    PluginBroken,
    PluginContractError,
    PluginNotFound,
    PluginOptionsError,
    PluginUnsuitable,
)
from octavo.plugins.families import FAMILIES, MODELS
from octavo.plugins.registry import Plugin, Registry
from octavo.selection.backends import survey_backends
from octavo.selection.report import describe_layers
from octavo.selection.select import model_needs, select
from octavo.testing import tiny_models

OWN = f"octavo {octavo.__version__}"
SUBJECT = "The attention backend theirs (their_module:Backend, from their-package 1.0)"
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """Whether Triton's is on differs from machine to machine, and with it whether triton could serve on a CPU."""
    monkeypatch.setattr(
        "octavo.attention_backends.triton.backend.TritonBackend.cannot_serve",
        classmethod(lambda cls, spec: ["No GPU."]),
    )


def config_for(folder, **settings):
    return EngineConfig.from_flat(model=str(folder), **{"num_kv_blocks": 20, **settings})


def report(folder, **settings):
    return select(config_for(folder, **settings), fresh_scan()).lines()


def refusal(error, folder, **settings):
    with pytest.raises(error) as caught:
        report(folder, **settings)
    return str(caught.value)


def install_backend(site, source=BACKEND, name="theirs", package="their-package", module="their_module"):
    install(site, package, f"[octavo.attention_backends]\n{name} = {module}:Backend\n", **{module: source})


def refusing(*reasons):
    return f"{BACKEND}\n    @classmethod\n    def cannot_serve(cls, spec): return {list(reasons)!r}\n"


# -- the report -------------------------------------------------------------------------------------------------

MODEL_LINE = f"model class: llama ({OWN}), by default; 'auto': model_type is 'llama'"
AUTO_LINE = (
    f"attention backend of full_attention (layers 0-1): torch_sdpa ({OWN}), by default; 'auto' takes the first of "
    "Octavo's own that can serve"
)
# Octavo's own beside torch_sdpa: with "auto" on a CPU, and where something is named.
NOT_ON_A_CPU = [f"  not {name} ({OWN}): 'auto' takes it on cuda devices only." for name in ("flash_attn", "triton")]
UNASKED = {name: f"  not {name} ({OWN}): Not asked for." for name in ("flash_attn", "torch_sdpa", "triton")}
BY_KIND = "by default; named as what the layers keep"
MANAGER_LINE = f"KV-cache manager of full_attention (layers 0-1): full_attention ({OWN}), {BY_KIND}"


def test_the_report_names_each_part_where_it_was_chosen_and_why(tiny_folder):
    assert report(tiny_folder) == [
        MODEL_LINE,
        AUTO_LINE,
        *NOT_ON_A_CPU,
        MANAGER_LINE,
        f"request queue: fcfs ({OWN}), by default",
        f"hash function: sha256 ({OWN}), by default",
    ]


def test_the_report_says_which_choices_were_written_where(tiny_folder, tmp_path):
    path = tmp_path / "octavo.toml"
    path.write_text("model_impl = 'llama'\n[scheduler]\nrequest_queue = 'fcfs'\n[cache]\nhash_function = 'sha256'\n")
    flags = {"model": str(tiny_folder), "attention_backend": "torch_sdpa", "request_queue": "fcfs"}
    config = make_config(path, flags).with_settings(hash_function="blake2b", num_kv_blocks=20)
    assert select(config, fresh_scan()).lines() == [
        f"model class: llama ({OWN}), by {path}",
        f"attention backend of full_attention (layers 0-1): torch_sdpa ({OWN}), by flag --attention-backend",
        UNASKED["flash_attn"],
        UNASKED["triton"],
        MANAGER_LINE,
        f"request queue: fcfs ({OWN}), by flag --request-queue",
        f"hash function: blake2b ({OWN}), by argument",
    ]


def test_what_is_installed_beside_octavos_own_is_not_taken_and_not_even_imported(site, tiny_folder):
    install_backend(site, "raise RuntimeError('imported')")
    assert report(tiny_folder)[1:5] == [
        AUTO_LINE,
        *NOT_ON_A_CPU,
        "  not theirs (their-package 1.0): 'auto' takes only Octavo's own.",
    ]
    assert "their_module" not in sys.modules


def test_a_part_that_is_named_is_taken_with_its_options_and_the_others_were_not_asked_for(site, tiny_folder):
    schema = "    class Options(BaseModel):\n        k: int = 1\n"
    constructor = "    def __init__(self, spec, *, options): super().__init__(spec)\n"
    install_backend(site, f"from pydantic import BaseModel\n{BACKEND}\n{schema}{constructor}")
    lines = report(tiny_folder, attention_backend={"name": "their-package:theirs", "options": {"k": 2}})
    assert lines[1:5] == [
        "attention backend of full_attention (layers 0-1): theirs (their-package 1.0) with Options(k=2), by argument",
        *UNASKED.values(),
    ]


def test_a_backend_can_be_chosen_for_a_kind_and_goes_before_the_one_for_all(site, tiny_folder):
    install_backend(site)
    settings = {"attention_backends": {"full_attention": "theirs"}, "attention_backend": "torch_sdpa"}
    assert report(tiny_folder, **settings)[1:5] == [
        "attention backend of full_attention (layers 0-1): theirs (their-package 1.0), by argument",
        *UNASKED.values(),
    ]


def test_a_manager_that_is_named_and_observers_are_in_the_report(site, tiny_folder):
    watch = "import octavo\ncontract_version = 1\n@octavo.hookimpl\ndef engine_started(): ...\n"
    install(site, "watch-package", "[octavo.hooks]\nwatch = watch_module\n", watch_module=watch)
    lines = report(tiny_folder, kv_managers={"full_attention": "octavo:full_attention"}, hooks="watch")
    assert lines[4] == f"KV-cache manager of full_attention (layers 0-1): full_attention ({OWN}), by argument"
    assert lines[7:] == ["observer: watch (watch-package 1.0), by argument"]


def test_an_engine_logs_its_report_and_an_llm_has_it(tiny_folder, make_llm, caplog):
    with caplog.at_level(logging.INFO, "octavo"):
        llm = make_llm(tiny_folder, num_kv_blocks=20)
    lines = report(tiny_folder)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO][: len(lines)] == lines
    assert str(llm.selection) == "\n".join(lines)


@pytest.mark.parametrize(
    ("layers", "shown"),
    [
        ([3], "layer 3"),
        ([0, 1], "layers 0-1"),
        (range(30), "layers 0-29"),
        ([0, 2, 5, 6, 7], "layers 0, 2, 5-7"),
        ([], "layers "),
    ],
)
def test_layers_are_shown_as_people_write_them(layers, shown):
    assert describe_layers(layers) == shown


# -- models -----------------------------------------------------------------------------------------------------

MODEL = """
from octavo.models.llama import LlamaModel

class Theirs(LlamaModel):
    contract_version = 1
"""


def test_a_model_type_that_octavo_has_no_class_for_falls_to_transformers_whatever_is_installed(site, tiny_folder):
    install(site, "their-package", "[octavo.models]\nllama = their_module:Theirs\n", their_module=MODEL)
    registry = fresh_scan()
    plugins = [plugin for family in FAMILIES for plugin in registry.plugins(family)]
    others = [p for p in plugins if not (p.family is MODELS and p.is_built_in and p.name in ("llama", "transformers"))]
    fallback = Plugin(MODELS, "transformers", "their_module:Theirs", "octavo", "1.0")
    selection = select(config_for(tiny_folder), Registry([*others, fallback]))
    assert selection.lines()[0] == (
        "model class: transformers (octavo 1.0), by default; 'auto': no class of Octavo's own for model_type 'llama'"
    )


@pytest.mark.parametrize(
    ("method", "call", "occasion"),
    [
        ("spec_from_config", "config, **options", "when it was asked what the model needs"),
        ("from_checkpoint", "checkpoint, **options", "when it loaded the weights"),
    ],
)
def test_a_model_that_raises_is_named_and_octavos_own_errors_speak_for_themselves(
    site, tiny_folder, method, call, occasion
):
    body = f"    error = KeyError('rope')\n    @classmethod\n    def {method}(cls, {call}):\n        raise cls.error\n"
    install(site, "their-package", "[octavo.models]\ntheirs = their_module:Theirs\n", their_module=MODEL + body)
    config = config_for(tiny_folder, model_impl="theirs")
    with pytest.raises(PluginBroken) as caught:
        build_engine(config)
    assert str(caught.value) == (
        f"The model theirs (their_module:Theirs, from their-package 1.0) raised KeyError {occasion}: 'rope'"
    )
    importlib.import_module("their_module").Theirs.error = CheckpointError("A tensor is missing.")
    with pytest.raises(CheckpointError) as caught:
        build_engine(config)
    # Who is given the config alone cannot know whose it is.
    place = f"In '{tiny_folder}': " if method == "spec_from_config" else ""
    assert str(caught.value) == f"{place}A tensor is missing."


class TheirCheckpointError(CheckpointError):
    """Somebody's own kind, which needs to be told more."""

    def __init__(self, message, *, line):
        super().__init__(message)
        self.line = line


def test_a_packages_own_kind_of_model_error_stays_what_it_is(site, tiny_folder):
    body = "    @classmethod\n    def spec_from_config(cls, config, **options):\n        raise cls.error\n"
    install(site, "their-package", "[octavo.models]\ntheirs = their_module:Theirs\n", their_module=MODEL + body)
    error = TheirCheckpointError("A key is missing.", line=7)
    importlib.import_module("their_module").Theirs.error = error
    with pytest.raises(TheirCheckpointError) as caught:
        build_engine(config_for(tiny_folder, model_impl="theirs"))
    assert caught.value is error


KIND = """
from dataclasses import dataclass
from dataclasses import replace
from typing import ClassVar

from octavo.core.interfaces import FullAttentionSpec
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.models.llama import LlamaModel

@dataclass(frozen=True)
class OwnSpec(FullAttentionSpec):
    kind: ClassVar[str] = "their_kind"

class Manager(FullAttentionManager):
    contract_version = 1
    serves = OwnSpec
    adopted = 0

    def allocate_new_blocks(self, row, num_tokens):
        type(self).adopted += 1
        return super().allocate_new_blocks(row, num_tokens)

class Theirs(LlamaModel):
    contract_version = 1

    @classmethod
    def spec_from_config(cls, config, **options):
        spec = super().spec_from_config(config, **options)
        own = [OwnSpec(s.block_size, s.num_kv_heads, s.head_dim, s.dtype) for s in spec.kv_cache_specs]
        return replace(spec, kv_cache_specs=tuple(own))
"""


def test_layers_that_keep_what_a_package_invented_get_its_manager_by_the_name_of_the_kind(site, tiny_folder, make_llm):
    entries = "[octavo.models]\ntheirs = their_module:Theirs\n[octavo.kv_managers]\ntheir_kind = their_module:Manager\n"
    install(site, "their-package", entries, their_module=KIND)
    (expected,) = make_llm(tiny_folder, num_kv_blocks=20).generate("one", GREEDY, use_tqdm=False)
    llm = make_llm(tiny_folder, num_kv_blocks=20, model_impl="theirs")
    assert llm.selection.lines()[4] == (
        f"KV-cache manager of their_kind (layers 0-1): their_kind (their-package 1.0), {BY_KIND}"
    )
    (output,) = llm.generate("one", GREEDY, use_tqdm=False)
    assert output.outputs == expected.outputs
    assert importlib.import_module("their_module").Manager.adopted > 0


def test_layers_of_a_kind_that_nobody_has_a_manager_for_are_named_with_all_managers_there_are(site, tiny_folder):
    install(site, "their-package", "[octavo.models]\ntheirs = their_module:Theirs\n", their_module=KIND)
    assert refusal(PluginNotFound, tiny_folder, model_impl="theirs") == (
        "The model's layers keep OwnSpec(block_size=16, num_kv_heads=2, head_dim=16, dtype='float32'), and a manager "
        "for that is called as its kind. No KV-cache manager is called 'their_kind'. Installed: chunked_local, "
        "full_attention, mla, sliding_window. Install a package that registers one, or name one that serves such "
        "layers in kv_managers."
    )
    lines = report(tiny_folder, model_impl="theirs", kv_managers={"their_kind": "full_attention"})
    assert lines[4] == f"KV-cache manager of their_kind (layers 0-1): full_attention ({OWN}), by argument"


def test_groups_that_differ_in_their_layers_only_are_one_entry(tmp_path):
    lines = report(tiny_models.tiny_gemma3(tmp_path))
    assert [line.partition(":")[0] for line in lines if "(layer" in line] == [
        "attention backend of sliding_window (layers 0-4, 6)",
        "KV-cache manager of sliding_window (layers 0-4, 6)",
        "attention backend of full_attention (layer 5)",
        "KV-cache manager of full_attention (layer 5)",
    ]


FORGETFUL = """
from octavo.kv_managers.full_attention import FullAttentionManager

class Manager(FullAttentionManager):
    contract_version = 1
    shorter_prefixes_hold = False
    def skipped_blocks(self, num_computed_tokens): return range(max(num_computed_tokens - 64, 0) // self.block_size)
"""


def test_a_manager_that_gives_back_what_the_attention_still_reads_is_refused(site, tiny_folder):
    install(site, "their-package", "[octavo.kv_managers]\nforgetful = their_module:Manager\n", their_module=FORGETFUL)
    config = config_for(tiny_folder, kv_managers={"full_attention": "forgetful"})
    with pytest.raises(PluginContractError) as caught:
        build_engine(config)
    assert str(caught.value) == (
        "The KV-cache manager forgetful (their_module:Manager, from their-package 1.0), which serves "
        "FullAttentionSpec(block_size=16, num_kv_heads=2, head_dim=16, dtype='float32'), gives back the blocks 0 to 2 "
        "of 16 tokens once 112 tokens are computed, and the model's attention (window=None, chunk=None, keep_first=0) "
        "reads from position 0 on. The model's attention specs and KV-cache specs have to say the same, or another "
        "manager has to be named in kv_managers."
    )


WIDER = """
from dataclasses import replace

from octavo.models.llama import LlamaModel

class Model(LlamaModel):
    contract_version = 1
    @classmethod
    def spec_from_config(cls, config, **settings):
        spec = super().spec_from_config(config, **settings)
        wider = tuple(replace(attention, window=attention.window + 1) for attention in spec.attention_specs)
        return replace(spec, attention_specs=wider)
"""


def test_a_model_that_reads_one_token_more_than_it_keeps_is_refused(site, tmp_path):
    install(site, "their-package", "[octavo.models]\nwider = their_module:Model\n", their_module=WIDER)
    folder = tiny_models.tiny_mistral(tmp_path / "mistral", sliding_window=17)
    config = config_for(folder, model_impl="wider")
    with pytest.raises(PluginContractError, match=r"attention \(window=18, chunk=None, keep_first=0\) reads from"):
        build_engine(config)


def test_a_model_type_that_is_no_text_is_refused(tiny_folder, tmp_path):
    config = json.loads((tiny_folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(tiny_folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": ["llama"]}))
    assert refusal(CheckpointError, tmp_path) == (
        f"The config of '{tmp_path}' gives ['llama'] as model_type; it has to be the name of one."
    )


STAYING = """
from dataclasses import dataclass, replace
from typing import ClassVar

from octavo.core.interfaces import SlidingWindowSpec
from octavo.kv_managers.sliding_window import SlidingWindowManager
from octavo.models.llama import LlamaModel

@dataclass(frozen=True)
class OwnSpec(SlidingWindowSpec):
    kind: ClassVar[str] = "their_kind"
    def without_recycling(self): return self

class Manager(SlidingWindowManager):
    contract_version = 1
    serves = OwnSpec

class Model(LlamaModel):
    contract_version = 1
    @classmethod
    def spec_from_config(cls, config, **options):
        spec = super().spec_from_config(config, **options)
        own = [OwnSpec(s.block_size, s.num_kv_heads, s.head_dim, s.dtype, s.window) for s in spec.kv_cache_specs]
        return replace(spec, kv_cache_specs=tuple(own))
"""


def test_a_spec_that_the_switch_does_not_change_is_warned_of(site, tmp_path, caplog):
    entries = "[octavo.models]\ntheirs = their_module:Model\n[octavo.kv_managers]\ntheir_kind = their_module:Manager\n"
    install(site, "their-package", entries, their_module=STAYING)
    folder = tiny_models.tiny_mistral(tmp_path / "mistral")
    build_engine(config_for(folder, model_impl="theirs", disable_hybrid_kv_cache_manager=True)).engine.shutdown()
    (warning,) = (record.getMessage() for record in caplog.records if "no effect" in record.getMessage())
    assert warning == (
        "disable_hybrid_kv_cache_manager has no effect on the layers that keep OwnSpec(block_size=16, num_kv_heads=2, "
        "head_dim=16, dtype='float32', window=16): its without_recycling does not say what else they could keep"
    )
    caplog.clear()
    build_engine(config_for(folder, disable_hybrid_kv_cache_manager=True)).engine.shutdown()
    assert not [record for record in caplog.records if "no effect" in record.getMessage()]


def test_a_manager_that_serves_other_layers_is_refused(site, tiny_folder):
    install(site, "their-package", "[octavo.kv_managers]\ntheirs = their_module:Manager\n", their_module=KIND)
    chosen = {"kv_managers": {"full_attention": "theirs"}}
    assert refusal(PluginUnsuitable, tiny_folder, **chosen) == (
        "The KV-cache manager theirs (their_module:Manager, from their-package 1.0) serves OwnSpec, and the model's "
        "layers keep FullAttentionSpec; choose another one in kv_managers."
    )
    importlib.import_module("their_module").Manager.serves = "OwnSpec"
    assert refusal(PluginBroken, tiny_folder, **chosen).startswith(
        "The KV-cache manager theirs (their_module:Manager, from their-package 1.0) raised TypeError when it was asked "
        "what it serves: "
    )


# -- what cannot be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["attention_backends", "kv_managers"])
def test_a_kind_that_the_model_does_not_have_is_no_choice(tiny_folder, setting):
    name = {"attention_backends": "torch_sdpa", "kv_managers": "full_attention"}[setting]
    assert refusal(ConfigError, tiny_folder, **{setting: {"window": name}}) == (
        f"{setting} chooses '{name}' for the kind 'window', and the model's layers keep: full_attention."
    )


@pytest.mark.parametrize(
    ("kind", "way_out"),
    [
        ("slidng_window", "Did you mean 'sliding_window'?"),
        ("full_attn", "Did you mean 'full_attention'?"),
        ("mamba", "Name one of these, or leave the choice out."),
    ],
)
@pytest.mark.parametrize("setting", ["attention_backends", "kv_managers"])
def test_of_a_kind_that_the_model_does_not_have_those_it_has_are_listed_once(tmp_path, setting, kind, way_out):
    name = {"attention_backends": "torch_sdpa", "kv_managers": "full_attention"}[setting]
    assert refusal(ConfigError, tiny_models.tiny_gemma3(tmp_path), **{setting: {kind: name}}) == (
        f"{setting} chooses '{name}' for the kind {kind!r}, and the model's layers keep: sliding_window, "
        f"full_attention. {way_out}"
    )


def test_a_backend_that_cannot_serve_is_refused_with_every_reason_and_those_that_could(site, tiny_folder):
    install_backend(site, refusing("No float32.", "No CPU."))
    install_backend(site, BACKEND, "able", "able-package", "able_module")
    install_backend(site, "raise RuntimeError('broken')", "broken", "broken-package", "broken_module")
    install_backend(site, refusing("No."), "unable", "unable-package", "unable_module")
    assert refusal(PluginUnsuitable, tiny_folder, attention_backend="theirs") == (
        f"{SUBJECT} cannot serve this model here: No float32. No CPU. Installed ones that could: torch_sdpa, "
        "able-package:able."
    )


def test_where_no_installed_backend_could_serve_that_is_said(site, tiny_folder, monkeypatch):
    from octavo.attention_backends.torch_sdpa import TorchSDPABackend

    install_backend(site, refusing("No float32."))
    monkeypatch.setattr(TorchSDPABackend, "cannot_serve", classmethod(lambda cls, spec: ["One reason.", "Another."]))
    assert refusal(PluginUnsuitable, tiny_folder, attention_backend="theirs") == (
        f"{SUBJECT} cannot serve this model here: No float32. No installed one could."
    )
    assert refusal(PluginUnsuitable, tiny_folder) == (
        "None of Octavo's own attention backends can serve this model here. torch_sdpa: One reason. Another. No "
        "installed one could."
    )
    install_backend(
        site,
        BACKEND.replace("= 1", "= 1\n    @classmethod\n    def cannot_serve(cls, spec): return []"),
        "able",
        "able-package",
        "able_module",
    )
    assert refusal(PluginUnsuitable, tiny_folder) == (
        "None of Octavo's own attention backends can serve this model here. torch_sdpa: One reason. Another. Installed "
        "ones that could: able-package:able."
    )


def test_a_backend_of_octavos_own_that_cannot_be_imported_is_named_with_its_cause(tiny_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "octavo.attention_backends.torch_sdpa", None)
    sentence = refusal(PluginUnsuitable, tiny_folder)
    assert sentence == (
        "None of Octavo's own attention backends can serve this model here. torch_sdpa: The attention backend "
        f"torch_sdpa (octavo.attention_backends.torch_sdpa:TorchSDPABackend, from {OWN}) cannot be imported: "
        "ModuleNotFoundError: import of octavo.attention_backends.torch_sdpa halted; None in sys.modules. No installed "
        "one could."
    )


@pytest.mark.parametrize("answer", ["No CPU.", None, [5], {"No CPU.": 1}])
def test_a_backend_that_answers_with_something_else_than_sentences_is_blamed(site, tiny_folder, answer):
    install_backend(site, f"{BACKEND}\n    @classmethod\n    def cannot_serve(cls, spec): return {answer!r}\n")
    assert refusal(PluginContractError, tiny_folder, attention_backend="theirs") == (
        f"{SUBJECT} answers cannot_serve with {answer!r}; it must be a list of sentences, empty when it can serve."
    )


def test_a_backend_that_raises_when_it_is_asked_or_made_is_blamed(site, tiny_folder):
    install_backend(
        site,
        f"{BACKEND}\n    asked = made = False\n"
        "    @classmethod\n    def cannot_serve(cls, spec): return [] if not cls.asked else 1 / 0\n"
        "    def __init__(self, spec): raise OSError('no device')\n",
    )
    config = config_for(tiny_folder, attention_backend="theirs")
    with pytest.raises(PluginBroken) as caught:
        build_engine(config)
    assert str(caught.value) == f"{SUBJECT} raised OSError when it was made: no device"
    importlib.import_module("their_module").Backend.asked = True
    assert refusal(PluginBroken, tiny_folder, attention_backend="theirs") == (
        f"{SUBJECT} raised ZeroDivisionError when it was asked what it can serve: division by zero"
    )


def test_every_installed_backend_can_be_asked_and_none_that_is_broken_stops_that(site, tiny_folder, monkeypatch):
    monkeypatch.setattr(
        "octavo.attention_backends.flash_attn.FlashAttentionBackend.cannot_serve",
        classmethod(lambda cls, spec, options=None: ["No GPU that is new enough."]),
    )
    install_backend(site, "raise SystemExit(1)")
    install_backend(
        site,
        f"from pydantic import BaseModel\n{BACKEND}\n    class Options(BaseModel):\n        k: int\n"
        "    def __init__(self, spec, *, options): super().__init__(spec)\n",
        "choosy",
        "choosy-package",
        "choosy_module",
    )
    install_backend(
        site,
        "from octavo.errors import ConfigError\n"
        + BACKEND
        + "\n    @classmethod\n    def cannot_serve(cls, spec): raise ConfigError('No driver.')\n",
        "driven",
        "driven-package",
        "driven_module",
    )
    install_backend(site, f"{BACKEND}\n    Options = dict\n", "dicty", "dicty-package", "dicty_module")
    registry = fresh_scan()
    needs = model_needs(config_for(tiny_folder), registry)
    answers = survey_backends(registry, needs.attention_specs(needs.groups[0]))
    assert {plugin.name: reasons for plugin, reasons in answers.items()} == {
        "flash_attn": ("No GPU that is new enough.",),
        "torch_sdpa": (),
        "triton": ("No GPU.",),
        "choosy": (),
        "dicty": (
            "The attention backend dicty (dicty_module:Backend, from dicty-package 1.0) has Options that are not a "
            "pydantic model.",
        ),
        "driven": ("No driver.",),
        "theirs": (f"{SUBJECT} cannot be imported: SystemExit: 1.",),
    }


@pytest.mark.parametrize("setting", ["attention_backend", "model_impl"])
def test_auto_takes_no_options(tiny_folder, setting):
    assert refusal(PluginOptionsError, tiny_folder, **{setting: PluginChoice("auto", {"k": 1})}) == (
        f"{setting} is 'auto', which takes no options, and was given 'k'; name the part that they are for."
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"attention_backend": "torch_spda"},
            "No attention backend is called 'torch_spda'. Did you mean 'torch_sdpa'?",
        ),
        (
            {"attention_backends": {"full_attention": "flash"}},
            "No attention backend is called 'flash'. Did you mean 'flash_attn'?",
        ),
        ({"request_queue": "fcsf"}, "No request queue is called 'fcsf'. Did you mean 'fcfs'?"),
        ({"hash_function": "md5"}, "No hash function is called 'md5'."),
        ({"model_impl": "lama"}, "No model is called 'lama'. Did you mean 'llama'?"),
        ({"kv_managers": {"full_attention": "mine"}}, "No KV-cache manager is called 'mine'."),
        ({"hooks": ["mine"]}, "No observer is called 'mine'."),
    ],
)
def test_names_are_looked_up_before_the_models_files(monkeypatch, settings, sentence):
    def opened(model):
        raise AssertionError("too early")

    monkeypatch.setattr("octavo.models.checkpoint.open_checkpoint", opened)
    assert refusal(PluginNotFound, "anything", **settings).startswith(f"{sentence} Installed: ")


# -- the environment --------------------------------------------------------------------------------------------


def test_a_variable_that_has_no_effect_is_named_once_an_engine(tiny_folder, make_llm, monkeypatch, caplog):
    monkeypatch.setenv("OCTAVO_ATTENTION_BAKEND", "flash")
    with caplog.at_level(logging.WARNING):
        make_llm(tiny_folder, num_kv_blocks=20)
    assert [record.getMessage() for record in caplog.records] == [
        "The environment variable OCTAVO_ATTENTION_BAKEND has no effect: Octavo takes no settings from there; pass "
        "attention_backend as an argument, as the flag --attention-backend, or in a config file."
    ]


def test_a_queue_that_is_chosen_is_the_one_that_runs(site, tiny_folder, make_llm):
    last_first = (
        f"{QUEUE}\n    popped = []\n"
        "    def add_request(self, request): self._requests.appendleft(request)\n"
        "    def pop_request(self):\n"
        "        self.popped.append(self.peek_request().request_id)\n"
        "        return super().pop_request()\n"
    )
    install(site, "their-package", "[octavo.request_queues]\ntheirs = their_module:Queue\n", their_module=last_first)
    llm = make_llm(tiny_folder, num_kv_blocks=20, request_queue="theirs", max_num_seqs=1)
    llm.generate([{"prompt": name, "request_id": name} for name in "abc"], GREEDY, use_tqdm=False)
    assert importlib.import_module("their_module").Queue.popped == ["c", "b", "a"]
