"""The tree of exceptions is as its page draws it."""

import inspect
import re

import pytest

from octavo import errors
from octavo.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    MissingExtraError,
    NotEnoughMemoryError,
    OctavoError,
)

CLASSES = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls)}


def drawn_tree():
    """Return (depth, class name, further base) for each line of the drawing."""
    lines = re.findall(r"^([│├└─ ]*)(\w+) *(?:\((\w+)\))?", errors.__doc__, flags=re.MULTILINE)
    return [(len(branch) // 4, name, base) for branch, name, base in lines if name in CLASSES]


def test_the_drawing_has_every_class_once():
    assert sorted(name for _, name, _ in drawn_tree()) == sorted(CLASSES)


def test_the_drawing_has_each_class_below_its_base():
    path = []
    for depth, name, further_base in drawn_tree():
        del path[depth:]
        bases = [base.__name__ for base in CLASSES[name].__bases__]
        assert bases == ([path[-1]] if path else ["Exception"]) + ([further_base] if further_base else [])
        path.append(name)


def test_everything_raised_on_purpose_can_be_caught_as_one():
    assert all(issubclass(cls, OctavoError) for cls in CLASSES.values())


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_each_class_says_when_it_is_raised(cls):
    assert cls.__doc__.strip()


def test_wrong_requests_and_settings_are_value_errors_to_python():
    assert issubclass(InvalidRequestError, ValueError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(MissingExtraError, ImportError)
    assert issubclass(EngineClosedError, RuntimeError)


def test_errors_carry_what_a_program_needs_besides_the_sentence():
    assert InvalidRequestError("n is wrong", parameter="n").parameter == "n"
    assert InvalidRequestError("something is wrong").parameter is None
    assert str(InvalidRequestError("n is wrong", parameter="n")) == "n is wrong"
    assert NotEnoughMemoryError("too long", max_model_len_that_fits=80).max_model_len_that_fits == 80
