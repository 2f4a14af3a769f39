"""Templates run in a sandbox, and what goes wrong in one is the request's error."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from octavo.errors import InvalidRequestError
from octavo.models.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: Any = HELLO) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s>Hello</s>"),
        ("{% if add_generation_prompt %}go{% endif %}{{ tools is none }}", "goTrue"),
        ("{{ '<é>' | tojson }}", '"<é>"'),
        ("{% for m in messages %}a{% break %}{% endfor %}", "a"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_a_template_may_use_what_transformers_offers(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[1]['content'] + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ range(10 ** 9) | list }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"chat template does not accept these messages: .") as caught:
        render(source)
    assert caught.value.parameter == "messages"


def test_the_reason_that_a_template_gives_is_passed_on() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_is_not_jinja_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Jinja"):
        render("{% for %}")


def test_messages_are_plain_strings_inside_a_template() -> None:
    class Tricky(str):
        def danger(self) -> str:
            return "reached"

    with pytest.raises(InvalidRequestError, match="danger"):
        render("{{ messages[0].content.danger() }}", [{"role": "user", "content": Tricky("x")}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 3 ** (10 ** 8) }}",
        "{{ 'a' * 3000000000 }}",
        "{{ 3000000000 * [1] }}",
        "{% for i in range(90000) %}{{ 'abcdefghij' * 100 }}{% endfor %}",
        "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    ],
)
def test_a_template_that_makes_something_huge_or_is_too_deep_is_refused_quickly(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source)


def test_small_products_and_powers_are_allowed() -> None:
    assert render("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 6 * 7 }}") == "---102442"
