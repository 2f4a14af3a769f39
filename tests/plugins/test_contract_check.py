"""What a package registers is held against its family's contract, and what is wrong is said in full sentences."""

import logging
import subprocess
import sys

import pytest
from fake_packages import BACKEND, QUEUE, fresh_scan, install, install_queue

from octavo.core.interfaces import CONTRACT_VERSION
from octavo.errors import PluginBroken, PluginContractError
from octavo.plugins.families import ATTENTION_BACKENDS, HASH_FUNCTIONS, HOOKS, KV_MANAGERS, MODELS, REQUEST_QUEUES

QUEUE_SUBJECT = "The request queue theirs (their_module:Queue, from their-package 1.0)"
BACKEND_SUBJECT = "The attention backend theirs (their_module:Backend, from their-package 1.0)"
MANAGER_SUBJECT = "The KV-cache manager theirs (their_module:Manager, from their-package 1.0)"
MODEL_SUBJECT = "The model theirs (their_module:Theirs, from their-package 1.0)"

MODEL = """
from octavo.models.llama import LlamaModel
from pydantic import BaseModel

class Theirs(LlamaModel):
    contract_version = 1
"""


def load(site, family, target, source):
    install(site, "their-package", f"[{family.group}]\ntheirs = their_module:{target}\n", their_module=source)
    return fresh_scan().load(family, "theirs")


def load_queue(site, source):
    install_queue(site, source)
    return fresh_scan().load(REQUEST_QUEUES, "theirs")


def refusal(call, *args):
    with pytest.raises(PluginContractError) as caught:
        call(*args)
    return str(caught.value)


def test_a_part_that_keeps_the_contract_loads(site):
    assert load_queue(site, QUEUE)().heeds_priority is False


def test_a_part_that_is_no_subclass_of_the_contract_is_refused(site):
    assert refusal(load_queue, site, "class Queue: pass") == (
        f"{QUEUE_SUBJECT} is not a subclass of octavo.core.interfaces.request_queue.RequestQueue, which it must be."
    )


@pytest.mark.parametrize(
    ("source", "kind"), [("Queue = 5", "int"), ("def Queue(): pass", "function"), ("Queue = None", "NoneType")]
)
def test_a_part_that_is_no_class_is_refused_by_its_type(site, source, kind):
    assert refusal(load_queue, site, source) == (
        f"{QUEUE_SUBJECT} is of type {kind}, and must be a subclass of "
        "octavo.core.interfaces.request_queue.RequestQueue."
    )


def test_an_entry_point_that_stops_at_the_module_is_told_to_name_the_class(site):
    install(site, "their-package", "[octavo.request_queues]\ntheirs = their_module\n", their_module=QUEUE)
    assert refusal(fresh_scan().load, REQUEST_QUEUES, "theirs") == (
        "The request queue theirs (their_module, from their-package 1.0) is of type module, and must be a subclass of "
        "octavo.core.interfaces.request_queue.RequestQueue; its entry point must name the class: module:Class."
    )


def test_a_part_that_lacks_methods_is_refused_with_their_names(site):
    source = (
        "from octavo.core.interfaces import RequestQueue\n"
        "class Queue(RequestQueue):\n"
        "    contract_version = 1\n"
        "    def add_request(self, request): ...\n"
        "    def pop_request(self): ...\n"
        "    def peek_request(self): ...\n"
        "    def __len__(self): return 0\n"
        "    def __iter__(self): return iter(())\n"
    )
    assert refusal(load_queue, site, source) == f"{QUEUE_SUBJECT} does not define prepend_request, remove_request."


def test_a_manager_that_does_not_say_what_it_serves_is_refused(site):
    source = (
        "from octavo.core.interfaces import SingleTypeKVCacheManager\n"
        "class Manager(SingleTypeKVCacheManager):\n"
        "    contract_version = 1\n"
        "    def longest_prefix(self, is_cached, max_blocks, alignment_blocks): return 0\n"
    )
    assert refusal(load, site, KV_MANAGERS, "Manager", source) == f"{MANAGER_SUBJECT} does not set serves."


# -- versions ---------------------------------------------------------------------------------------------------

NO_VERSION = (
    f"{QUEUE_SUBJECT} does not say which contract version it was built for. This Octavo has version "
    f"{CONTRACT_VERSION}; a part that was built for it says: contract_version = {CONTRACT_VERSION}"
)


@pytest.mark.parametrize(
    "body", ["pass", "contract_version = None"], ids=["inherited from a class of Octavo's", "stated as None"]
)
def test_a_part_that_states_no_contract_version_is_refused(site, body):
    assert refusal(load_queue, site, QUEUE.replace("contract_version = 1", body)) == NO_VERSION


def test_a_base_class_of_the_same_author_may_state_the_version(site):
    loaded = load_queue(site, QUEUE.replace("class Queue", "class Base") + "\nclass Queue(Base): pass\n")
    assert loaded.contract_version == 1


@pytest.mark.parametrize("version", [CONTRACT_VERSION + 1, 99])
def test_a_part_built_for_a_later_contract_version_is_refused_with_both_numbers(site, version):
    assert refusal(load_queue, site, QUEUE.replace("= 1", f"= {version}")) == (
        f"{QUEUE_SUBJECT} was built for contract version {version}, and this Octavo has version {CONTRACT_VERSION}; "
        "install an Octavo that has it."
    )


def test_a_part_built_for_a_version_of_long_ago_is_refused(site):
    assert refusal(load_queue, site, QUEUE.replace("= 1", f"= {CONTRACT_VERSION - 2}")) == (
        f"{QUEUE_SUBJECT} was built for contract version {CONTRACT_VERSION - 2}, and this Octavo has version "
        f"{CONTRACT_VERSION}; install a release of their-package that was built for it."
    )


@pytest.mark.parametrize(
    ("version", "kind"), [("1", "str"), (True, "bool"), (1.0, "float"), (99.0, "float"), ((1, 0), "tuple")]
)
def test_a_version_that_is_no_whole_number_is_refused_with_its_type(site, version, kind):
    assert refusal(load_queue, site, QUEUE.replace("= 1", f"= {version!r}")) == (
        f"{QUEUE_SUBJECT} says contract_version = {version!r}, of type {kind}; it must be a whole number, such as "
        f"{CONTRACT_VERSION}."
    )


def test_a_part_built_for_the_version_before_loads_with_one_warning_that_has_both_numbers(site, caplog):
    install_queue(site, QUEUE.replace("= 1", f"= {CONTRACT_VERSION - 1}"))
    registry = fresh_scan()
    with caplog.at_level(logging.WARNING):
        assert registry.load(REQUEST_QUEUES, "theirs") is registry.load(REQUEST_QUEUES, "their-package:theirs")
    assert [record.getMessage() for record in caplog.records] == [
        "the request queue theirs (their_module:Queue, from their-package 1.0) was built for contract version "
        f"{CONTRACT_VERSION - 1}, and this Octavo has version {CONTRACT_VERSION}; it is used, and the next version "
        "will refuse it"
    ]


def test_the_version_is_looked_at_before_what_may_have_changed_with_it(site):
    source = BACKEND.replace("= 1", "= 99") + "    def attend(self): ...\n"
    assert refusal(load, site, ATTENTION_BACKENDS, "Backend", source) == (
        f"{BACKEND_SUBJECT} was built for contract version 99, and this Octavo has version {CONTRACT_VERSION}; install "
        "an Octavo that has it."
    )


# -- signatures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        (
            "def attend(self, query, kv_cache, plan): ...",
            "defines attend(query, kv_cache, plan), which cannot be called as attend(query, kv_cache, plan, sinks=..., "
            "return_lse=...): got an unexpected keyword argument 'sinks'.",
        ),
        (
            "def attend(self, query, kv_cache, plan, *, sinks=None): ...",
            "defines attend(query, kv_cache, plan, *, sinks=None), which cannot be called as attend(query, kv_cache, "
            "plan, sinks=..., return_lse=...): got an unexpected keyword argument 'return_lse'.",
        ),
        (
            "def attend(self, query, kv_cache, plan, *, sinks, return_lse): ...",
            "defines attend(query, kv_cache, plan, *, sinks, return_lse), which cannot be called as attend(query, "
            "kv_cache, plan): missing a required argument: 'sinks'.",
        ),
        (
            "def write(self, key, value, kv_cache, slots, layer): ...",
            "defines write(key, value, kv_cache, slots, layer), which cannot be called as write(key, value, kv_cache, "
            "slots): missing a required argument: 'layer'.",
        ),
        (
            "def plan(self): ...",
            "defines plan(), which cannot be called as plan(batch): too many positional arguments.",
        ),
        ("def cannot_serve(cls, spec): return []", "defines cannot_serve without @classmethod."),
    ],
)
def test_a_method_that_cannot_be_called_as_promised_is_refused(site, method, fault):
    assert refusal(load, site, ATTENTION_BACKENDS, "Backend", f"{BACKEND}\n    {method}\n") == (
        f"{BACKEND_SUBJECT} {fault}"
    )


@pytest.mark.parametrize(
    "method",
    [
        "def attend(self, *args, **kwargs): ...",
        "def attend(*args, **kwargs): ...",
        "def attend(self, q, cache, prepared, *, sinks=None, return_lse=False, more=5): ...",
        "def attend(self, q, cache, prepared, sinks=None, return_lse=False): ...",
        "@staticmethod\n    def cannot_serve(spec): return []",
        "@classmethod\n    def cannot_serve(cls, spec, /): return []",
        "@staticmethod\n    def plan(batch): ...",
        "@classmethod\n    def plan(cls, batch): ...",
        "plan = len",
    ],
)
def test_a_method_that_can_be_called_as_promised_may_be_written_in_any_way(site, method):
    assert load(site, ATTENTION_BACKENDS, "Backend", f"{BACKEND}\n    {method}\n").__name__ == "Backend"


def test_a_model_with_options_gets_them_where_it_is_made(site):
    body = (
        "    class Options(BaseModel):\n        k: int = 1\n"
        "    @classmethod\n    def from_checkpoint(cls, checkpoint, *, dtype, device, options): ...\n"
    )
    assert load(site, MODELS, "Theirs", MODEL + body).Options().k == 1


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            "    class Options(BaseModel):\n        k: int = 1\n"
            "    @classmethod\n    def from_checkpoint(cls, checkpoint, *, dtype, device): ...\n",
            "defines from_checkpoint(checkpoint, *, dtype, device), which cannot be called as "
            "from_checkpoint(checkpoint, dtype=..., device=..., options=...): got an unexpected keyword argument "
            "'options'.",
        ),
        (
            "    @classmethod\n    def from_checkpoint(cls, checkpoint, *, dtype, device, options): ...\n",
            "defines from_checkpoint(checkpoint, *, dtype, device, options), which cannot be called as "
            "from_checkpoint(checkpoint, dtype=..., device=...): missing a required argument: 'options'.",
        ),
    ],
)
def test_a_model_whose_options_and_arguments_do_not_match_is_refused(site, body, fault):
    assert refusal(load, site, MODELS, "Theirs", MODEL + body) == f"{MODEL_SUBJECT} {fault}"


# -- options and constructors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", ["dict", "5", "lambda **options: None"])
def test_options_that_are_no_pydantic_model_are_refused_when_the_part_is_loaded(site, schema):
    source = f"{BACKEND}\n    Options = {schema}\n"
    assert refusal(load, site, ATTENTION_BACKENDS, "Backend", source) == (
        f"{BACKEND_SUBJECT} has Options that are not a pydantic model."
    )


def test_the_options_of_an_observer_are_looked_at_too(site):
    source = "class Watch:\n    contract_version = 1\n    Options = dict\n"
    install(site, "their-package", "[octavo.hooks]\ntheirs = their_module:Watch\n", their_module=source)
    assert refusal(fresh_scan().load, HOOKS, "theirs") == (
        "The observer theirs (their_module:Watch, from their-package 1.0) has Options that are not a pydantic model."
    )


OPTIONS = "    class Options(BaseModel):\n        k: int = 1\n"
BARE_BACKEND = """
from octavo.core.interfaces import AttentionBackend
from pydantic import BaseModel

class Backend(AttentionBackend):
    contract_version = 1
    @classmethod
    def cannot_serve(cls, spec): return []
    def plan(self, batch): ...
    def write(self, key, value, kv_cache, slots): ...
    def attend(self, query, kv_cache, plan, *, sinks=None, return_lse=False): ...
"""
HASH = """
from octavo.core.interfaces import HashFunction
from pydantic import BaseModel

class Hash(HashFunction):
    contract_version = 1
    def digest(self, data): return b"0" * 16
"""
HASH_SUBJECT = "The hash function theirs (their_module:Hash, from their-package 1.0)"


@pytest.mark.parametrize(
    ("verb", "source"),
    [
        ("defines", f"{BARE_BACKEND}{OPTIONS}    def __init__(self, spec): super().__init__(spec)\n"),
        ("inherits", f"{BARE_BACKEND}{OPTIONS}"),
        ("inherits", f"from pydantic import BaseModel\n{BACKEND}{OPTIONS}"),
    ],
    ids=["its own", "the contract's", "that of a class of Octavo's"],
)
def test_a_part_with_options_and_a_constructor_that_takes_none_is_refused(site, verb, source):
    assert refusal(load, site, ATTENTION_BACKENDS, "Backend", source) == (
        f"{BACKEND_SUBJECT} {verb} __init__(spec), which cannot be called as __init__(spec, options=...): got an "
        "unexpected keyword argument 'options'."
    )


def test_a_part_with_options_and_no_constructor_at_all_is_refused(site):
    assert refusal(load, site, HASH_FUNCTIONS, "Hash", HASH + OPTIONS) == (
        f"{HASH_SUBJECT} has Options, and no __init__ that takes them: __init__(options=...)."
    )


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            "    def __init__(self, spec, tile): super().__init__(spec)\n",
            "defines __init__(spec, tile), which cannot be called as __init__(spec): missing a required argument: "
            "'tile'.",
        ),
        (
            "    def __init__(self): ...\n",
            "defines __init__(), which cannot be called as __init__(spec): too many positional arguments.",
        ),
        (
            "    def __init__(self, spec, *, options): super().__init__(spec)\n",
            "defines __init__(spec, *, options), which cannot be called as __init__(spec): missing a required "
            "argument: 'options'.",
        ),
        (
            f"{OPTIONS}    def __init__(self, spec, tile, *, options): super().__init__(spec)\n",
            "defines __init__(spec, tile, *, options), which cannot be called as __init__(spec, options=...): missing "
            "a required argument: 'tile'.",
        ),
    ],
)
def test_a_constructor_that_needs_something_else_than_it_is_given_is_refused(site, body, fault):
    assert refusal(load, site, ATTENTION_BACKENDS, "Backend", BARE_BACKEND + body) == f"{BACKEND_SUBJECT} {fault}"


def test_a_constructor_that_needs_something_where_the_contract_gives_nothing_is_refused(site):
    body = "    def __init__(self, size): ...\n"
    assert refusal(load, site, HASH_FUNCTIONS, "Hash", HASH + body) == (
        f"{HASH_SUBJECT} defines __init__(size), which cannot be called as __init__(): missing a required argument: "
        "'size'."
    )


@pytest.mark.parametrize(
    "body",
    [
        "    def __init__(self, spec, tile=4): super().__init__(spec)\n",
        "    def __init__(self, *args, **kwargs): super().__init__(*args, **kwargs)\n",
        f"{OPTIONS}    def __init__(self, *args, **kwargs): ...\n",
        f"{OPTIONS}    def __init__(*args, options=None): ...\n",
        f"{OPTIONS}    def __init__(self, spec, options, tile=4): super().__init__(spec)\n",
        # What is no plain function, as a compiled module's, has no signature that could be read.
        f"{OPTIONS}    __init__ = __import__('functools').partialmethod(lambda self, *args, **kwargs: None)\n",
    ],
)
def test_a_constructor_that_can_be_called_as_it_will_be_may_be_written_in_any_way(site, body):
    assert load(site, ATTENTION_BACKENDS, "Backend", BARE_BACKEND + body).__name__ == "Backend"


# -- flags, words and methods ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            "    def writes_before_reads(self): return False\n",
            "sets writes_before_reads to something of type function; it must be True or False.",
        ),
        (
            "    writes_before_reads = 'no'\n",
            "sets writes_before_reads to something of type str; it must be True or False.",
        ),
        (
            "    writes_before_reads = property(lambda self: False)\n",
            "sets writes_before_reads to something of type property; it must be True or False.",
        ),
        ("    plan = None\n", "sets plan to something of type NoneType; it must be a method."),
        ("    plan = property(lambda self: self)\n", "sets plan to something of type property; it must be a method."),
        ("    async def plan(self, batch): ...\n", "defines plan with async, and it is called without."),
        (
            "    def attend(self, query, kv_cache, plan, *, sinks=None, return_lse=False): yield\n",
            "defines attend as a generator, which does nothing before somebody iterates; it must return.",
        ),
    ],
)
def test_what_stands_where_a_flag_or_a_method_should_is_refused(site, body, fault):
    assert refusal(load, site, ATTENTION_BACKENDS, "Backend", BACKEND + body) == f"{BACKEND_SUBJECT} {fault}"


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("    heeds_priority = 'yes'\n", "sets heeds_priority to something of type str; it must be True or False."),
        ("    __len__ = None\n", "sets __len__ to something of type NoneType; it must be a method."),
        ("    __iter__ = 5\n", "sets __iter__ to something of type int; it must be a method."),
    ],
)
def test_a_queue_is_looked_at_as_closely(site, body, fault):
    assert refusal(load_queue, site, QUEUE + body) == f"{QUEUE_SUBJECT} {fault}"


def test_a_class_that_raises_when_it_is_looked_at_is_broken(site):
    source = QUEUE.replace(
        "class Queue(FCFSQueue):",
        """
class Meta(type(FCFSQueue)):
    @property
    def Options(cls): raise RuntimeError("hands off")

class Queue(FCFSQueue, metaclass=Meta):""",
    )
    with pytest.raises(PluginBroken) as caught:
        load_queue(site, source)
    assert str(caught.value) == f"{QUEUE_SUBJECT} raised RuntimeError: hands off when it was looked at"


def test_a_module_of_hooks_with_options_is_refused_since_nobody_would_give_it_them(site):
    source = (
        "import octavo\nfrom pydantic import BaseModel\ncontract_version = 1\nclass Options(BaseModel): ...\n"
        "@octavo.hookimpl\ndef step_finished(): ...\n"
    )
    install(site, "their-package", f"[{HOOKS.group}]\ntheirs = their_module\n", their_module=source)
    with pytest.raises(PluginContractError) as caught:
        fresh_scan().load(HOOKS, "theirs")
    assert str(caught.value) == (
        "The observer theirs (their_module, from their-package 1.0) has Options, and is a module, which nobody gives "
        "them to; make it a class whose constructor takes options."
    )


# -- what it takes ----------------------------------------------------------------------------------------------


def test_the_contracts_and_a_part_of_no_arithmetic_load_where_torch_is_not_installed(site):
    install_queue(site)
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'pydantic', 'transformers'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}')\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        f"sys.path.insert(0, {str(site)!r})\n"
        "import octavo.core.interfaces\n"
        "from their_module import Queue\n"
        "assert issubclass(Queue, octavo.core.interfaces.RequestQueue)\n"
        "from octavo.plugins.families import REQUEST_QUEUES\n"
        "from octavo.plugins.registry import scan\n"
        "print(len(scan().load(REQUEST_QUEUES, 'theirs')()))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("0\n", "")
