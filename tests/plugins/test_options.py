"""Options, from where they are written to the part of each family that takes them."""

import importlib

import pytest
from fake_packages import fresh_scan, install

from octavo import EngineConfig, PluginChoice
from octavo.assembly import build_engine
from octavo.cli.options import make_config
from octavo.errors import PluginOptionsError
from octavo.selection.select import select

ALL_FAMILIES = """
import octavo
from octavo.attention_backends.torch_sdpa import TorchSDPABackend
from octavo.hash_functions import Sha256
from octavo.kv_managers.full_attention import FullAttentionManager
from octavo.models.llama import LlamaModel
from octavo.request_queues import FCFSQueue
from pydantic import BaseModel

made = []

class Options(BaseModel):
    k: int = 0

class Told:
    contract_version = 1
    Options = Options

    def __init__(self, *arguments, options):
        made.append((type(self).__name__, options.k))
        super().__init__(*arguments)

class Backend(Told, TorchSDPABackend): pass
class Manager(Told, FullAttentionManager): pass
class Queue(Told, FCFSQueue): pass
class Hash(Told, Sha256): pass

class Watch(Told):
    @octavo.hookimpl
    def engine_started(self): ...

class Theirs(LlamaModel):
    contract_version = 1
    Options = Options

    @classmethod
    def from_checkpoint(cls, checkpoint, *, dtype, device, options):
        made.append((cls.__name__, options.k))
        return super().from_checkpoint(checkpoint, dtype=dtype, device=device)
"""

ENTRIES = """
[octavo.attention_backends]
mine = all_module:Backend
[octavo.kv_managers]
mine = all_module:Manager
[octavo.request_queues]
mine = all_module:Queue
[octavo.hash_functions]
mine = all_module:Hash
[octavo.models]
mine = all_module:Theirs
[octavo.hooks]
mine = all_module:Watch
"""

FILE = """
attention_backend = { name = "mine", options = { k = 1 } }
model_impl = { name = "mine", options = { k = 5 } }
hooks = [{ name = "mine", options = { k = 6 } }]
[cache]
hash_function = { name = "mine", options = { k = 4 } }
kv_managers.full_attention = { name = "mine", options = { k = 2 } }
[scheduler]
request_queue = { name = "mine", options = { k = 3 } }
"""


def mine(k):
    return {"name": "mine", "options": {"k": k}}


def test_options_reach_the_constructor_of_each_family_from_python_a_file_and_flags_alike(site, tiny_folder, tmp_path):
    install(site, "all-package", ENTRIES, all_module=ALL_FAMILIES)
    (tmp_path / "octavo.toml").write_text(FILE)
    written = '{{ name = "mine", options = {{ k = {} }} }}'
    flags = {
        "attention_backend": written.format(1),
        "kv_managers": f"{{ full_attention = {written.format(2)} }}",
        "request_queue": written.format(3),
        "hash_function": written.format(4),
        "model_impl": written.format(5),
        "hooks": f"[{written.format(6)}]",
    }
    arguments = {
        "attention_backend": mine(1),
        "kv_managers": {"full_attention": mine(2)},
        "request_queue": PluginChoice(**mine(3)),
        "hash_function": mine(4),
        "model_impl": mine(5),
        "hooks": mine(6),
    }
    configs = [
        EngineConfig.from_flat(**arguments),
        EngineConfig.from_toml(tmp_path / "octavo.toml"),
        make_config(None, flags),
    ]
    for config in configs:
        assert config == configs[0]
        build_engine(config.with_settings(model=str(tiny_folder), num_kv_blocks=20))
        made = importlib.import_module("all_module").made
        assert sorted(made) == [
            ("Backend", 1),
            ("Hash", 4),
            ("Manager", 2),
            ("Queue", 3),
            ("Theirs", 5),
            ("Watch", 6),
        ]
        made.clear()


def test_an_option_that_a_part_does_not_take_is_said_before_the_models_files(site, monkeypatch):
    install(site, "all-package", ENTRIES, all_module=ALL_FAMILIES)
    monkeypatch.setattr("octavo.models.checkpoint.open_checkpoint", None)
    sentence = r"all-package 1\.0\) does not take the option 'q'\. It takes: k\.$"
    for setting in ("attention_backend", "request_queue", "hash_function", "model_impl", "hooks"):
        config = EngineConfig.from_flat(**{setting: PluginChoice("mine", {"q": 1})})
        with pytest.raises(PluginOptionsError, match=sentence):
            select(config, fresh_scan())
