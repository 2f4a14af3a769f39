"""Attention backends by name and options, as the command line names them."""

import inspect

import pytest
from gpu_check.chosen import choice_of, part_of, reasons_of
from gpu_check.shapes import decode_shapes
from gpu_check.sizes import SMALL
from pydantic import BaseModel

from octavo.config import PluginChoice
from octavo.errors import PluginOptionsError
from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.registry import scan
from octavo.testing import installed

SPEC = decode_shapes(SMALL, "cpu")[0].spec


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("triton", "triton", {}),
        ("flash_attn+provider=torch_gather", "flash_attn", {"provider": "torch_gather"}),
        ("package:part+splits=4+tune=false+scale=0.5", "package:part", {"splits": 4, "tune": False, "scale": 0.5}),
    ],
)
def test_options_stand_behind_a_name(text, name, options):
    assert choice_of(text) == PluginChoice(name, options)


class Options(BaseModel):
    mood: str = "good"


class Moody(scan().load(ATTENTION_BACKENDS, "torch_sdpa")):
    contract_version = 1
    Options = Options

    def __init__(self, spec, options=None):
        super().__init__(spec)

    @classmethod
    def cannot_serve(cls, spec, options=None):
        return [] if options is None or options.mood == "good" else [f"The mood is {options.mood}."]


def test_what_a_backend_serves_may_depend_on_its_options():
    with installed({"octavo.attention_backends": {"moody": Moody}}):
        assert reasons_of(part_of("moody"), SPEC) == ()
        assert reasons_of(part_of("moody+mood=bad"), SPEC) == ("The mood is bad.",)
        with pytest.raises(PluginOptionsError):
            part_of("moody+move=bad")


def test_the_suite_asks_as_an_engine_does(monkeypatch):
    monkeypatch.setenv("GPU_CHECK_TASK", '{"suites": [], "device": "cpu"}')
    from gpu_check.suite_tests import suite_class

    with installed({"octavo.attention_backends": {"moody": Moody}}):
        bad, good = (suite_class(f"moody+mood={mood}", "float32", "cpu") for mood in ("bad", "good"))
        assert bad().reasons_against(SPEC) == ["The mood is bad."]
        assert good().reasons_against(SPEC) == []
        assert isinstance(good().make_backend(SPEC), Moody)
        assert bad.options == {"mood": "bad"}
        assert inspect.isclass(bad.backend)
        # Nothing is changed where there is nothing to say.
        assert suite_class("moody", "float32", "cpu").backend == "moody"
