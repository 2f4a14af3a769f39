"""Options: checked by the part's own schema, given to its constructor, and what is said when they are wrong."""

import pytest
from fake_packages import QUEUE, fresh_scan, install, install_queue

from octavo import EngineConfig, PluginChoice
from octavo.cli.options import make_config
from octavo.errors import ConfigError, OctavoError, PluginBroken, PluginContractError, PluginOptionsError
from octavo.plugins.families import HOOKS, REQUEST_QUEUES
from octavo.plugins.part import choose

SUBJECT = "the request queue theirs (their_module:Queue, from their-package 1.0)"

WITH_OPTIONS = """
from typing import Any, Literal
from pydantic import BaseModel, Field, model_validator
from octavo.request_queues import FCFSQueue

class Weights(BaseModel):
    short: float = 1.0
    long: float = 0.5

class Queue(FCFSQueue):
    contract_version = 1

    class Options(BaseModel):
        window: int = Field(default=8, ge=1)
        order: Literal["up", "down"] = "up"
        sizes: list[int] = []
        weights: Weights = Weights()
        first: int | None = Field(default=None, alias="from")

        @model_validator(mode="after")
        def check_window(self):
            if self.order == "down" and self.window > 100:
                raise ValueError("Order \\"down\\" takes a window of at most 100")
            return self

    def __init__(self, *, options):
        super().__init__()
        self.options = options
        options.sizes.append(99)
"""


def options_of(choice):
    """Return the options that a queue is made with."""
    return choose(fresh_scan(), REQUEST_QUEUES, choice).create().options


def refusal(error, choice):
    with pytest.raises(error) as caught:
        choose(fresh_scan(), REQUEST_QUEUES, choice)
    return str(caught.value)


# -- from the config to the constructor -------------------------------------------------------------------------


def test_a_choice_is_a_name_a_table_or_a_choice_wherever_it_is_written(site, tmp_path):
    install_queue(site, WITH_OPTIONS)
    file = tmp_path / "octavo.toml"
    file.write_text('[scheduler]\nrequest_queue = { name = "theirs", options = { window = 3, weights.long = 0.25 } }\n')
    options = {"window": 3, "weights": {"long": 0.25}}
    flag = '{ name = "theirs", options = { window = 3, weights = { long = 0.25 } } }'
    configs = [
        EngineConfig.from_flat(request_queue={"name": "theirs", "options": options}),
        EngineConfig.from_flat(request_queue=PluginChoice("theirs", options)),
        EngineConfig.from_toml(file),
        make_config(None, {"request_queue": flag}),
        make_config(file, {"seed": 0}),
    ]
    for config in configs:
        assert config.scheduler.request_queue == PluginChoice("theirs", options)
        made = options_of(config.scheduler.request_queue)
        assert (made.window, made.weights.long, made.weights.short, made.order) == (3, 0.25, 1.0, "up")


def test_without_options_the_parts_own_defaults_count(site):
    install_queue(site, WITH_OPTIONS)
    for written in ("theirs", "their-package:theirs", {"name": "theirs"}, {"name": "theirs", "options": {}}):
        assert options_of(EngineConfig.from_flat(request_queue=written).scheduler.request_queue).window == 8


@pytest.mark.parametrize("kind", ["list[int]", "Any"])
def test_what_becomes_of_the_callers_table_changes_nothing(site, kind):
    install_queue(site, WITH_OPTIONS.replace("list[int]", kind))
    sizes, written = [1, 2], {"name": "theirs", "options": {}}
    written["options"]["sizes"] = sizes
    config = EngineConfig.from_flat(request_queue=written)
    sizes.append(3)
    written["options"]["window"] = 0
    for _ in range(2):
        # The constructor appends a number to what it gets.
        assert options_of(config.scheduler.request_queue).sizes == [1, 2, 99]
    assert config.scheduler.request_queue == PluginChoice("theirs", {"sizes": [1, 2]})


def test_an_option_goes_by_its_alias(site):
    install_queue(site, WITH_OPTIONS)
    assert options_of(PluginChoice("theirs", {"from": 4})).first == 4


def test_a_schema_may_let_any_option_through(site):
    install_queue(
        site,
        WITH_OPTIONS.replace("    class Options(BaseModel):\n", "    class Options(BaseModel, extra='allow'):\n"),
    )
    assert options_of(PluginChoice("theirs", {"anything": [1]})).anything == [1]


FORM = 'a table such as { name = "my_part", options = { size = 64 } }'
NO_CHOICE = f"it must be a name, or {FORM}"
NO_PART = (
    "it must be the name of a part, under which a package registers it as an entry point; octavo.testing.installed "
    "registers one without a package"
)
BESIDE_THE_NAME = "beside the name, a part's options stand in a table of their own; write options ="
NO_OPTIONS = f"options must be a table of names and values: {FORM}"


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        (5, NO_CHOICE),
        ({}, NO_CHOICE),
        ({"options": {}}, NO_CHOICE),
        ({"name": 5}, NO_CHOICE),
        (PluginChoice(5), NO_PART),
        ("", "the name is empty"),
        ({"name": ""}, "the name is empty"),
        (PluginChoice(""), "the name is empty"),
        ({"name": "theirs", "options": 5}, NO_OPTIONS),
        ({"name": "theirs", "options": None}, NO_OPTIONS),
        ({"name": "theirs", "options": {5: 1}}, NO_OPTIONS),
        (PluginChoice("theirs", [1]), NO_OPTIONS),
        ({"name": "theirs", "option": {"k": 1}}, "beside 'name' it may have 'options' alone"),
        ({"name": "theirs", "k": 1, "options": {}}, f"{BESIDE_THE_NAME} {{ k = ... }}"),
    ],
)
def test_what_is_no_choice_is_refused(written, fault):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat(request_queue=written)
    shown = repr(written)
    if isinstance(written, dict):
        shown = "a table of " + (", ".join(map(repr, written)) or "nothing")
    assert str(caught.value) == f"request_queue is {shown}: {fault}."


def test_a_choice_that_is_wrong_is_shown_without_the_values_of_its_options():
    secret = {"name": "theirs", "options": {"key": "hunter2"}, "size": 1}
    for settings in ({"request_queue": secret}, {"hooks": [secret]}, {"kv_managers": {"full_attention": secret}}):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_flat(**settings)
        assert str(caught.value).endswith(f"{BESIDE_THE_NAME} {{ size = ... }}.")
        assert "hunter2" not in str(caught.value)
    choice = PluginChoice("theirs", {"key": "hunter2"})
    assert "hunter2" not in f"{choice!r} {choice} {EngineConfig.from_flat(request_queue=choice)!r}"
    assert (str(choice), repr(choice)) == ("theirs with key", "PluginChoice('theirs with key')")


def test_options_that_cannot_be_copied_are_refused():
    with pytest.raises(ConfigError, match="options must be plain values, which can be copied"):
        EngineConfig.from_flat(request_queue=PluginChoice("theirs", {"numbers": (n for n in range(3))}))


def test_all_that_is_no_part_of_a_choice_is_named_in_the_order_in_which_it_is_written():
    names = [f"key{number}" for number in range(9)]
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat(request_queue={"name": "theirs", **dict.fromkeys(names, 1)})
    assert str(caught.value).endswith(f"{BESIDE_THE_NAME} {{ {', '.join(f'{name} = ...' for name in names)} }}.")


def test_a_flag_that_is_no_toml_is_refused_with_an_example():
    with pytest.raises(ConfigError) as caught:
        make_config(None, {"request_queue": "{ name: x }"})
    sentence = str(caught.value)
    assert sentence.startswith("--request-queue cannot be read as TOML: ")
    assert sentence.endswith('. A part with options is written { name = "my_part", options = { size = 64 } }.')


# -- what is wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"windov": 1},
            f"T{SUBJECT[1:]} does not take the option 'windov'. Did you mean 'window'? It takes: window, order, sizes, "
            "weights, from.",
        ),
        (
            {"zzz": 1},
            f"T{SUBJECT[1:]} does not take the option 'zzz'. It takes: window, order, sizes, weights, from.",
        ),
        (
            {"window": "wide"},
            f"The option 'window' of {SUBJECT} is 'wide': input should be a valid integer, unable to parse string as "
            "an integer.",
        ),
        ({"window": 0}, f"The option 'window' of {SUBJECT} is 0: input should be greater than or equal to 1."),
        ({"order": "left"}, f"The option 'order' of {SUBJECT} is 'left': input should be 'up' or 'down'."),
        (
            {"weights": {"long": "x"}},
            f"The option 'weights.long' of {SUBJECT} is 'x': input should be a valid number, unable to parse string as "
            "a number.",
        ),
        (
            {"sizes": [1, None]},
            f"The option 'sizes.1' of {SUBJECT} is None: input should be a valid integer.",
        ),
        (
            {"window": 101, "order": "down"},
            f'The options of {SUBJECT} cannot go together: order "down" takes a window of at most 100.',
        ),
        (
            {"window": 0, "order": "left"},
            f"The option 'window' of {SUBJECT} is 0: input should be greater than or equal to 1. The option 'order' of "
            f"{SUBJECT} is 'left': input should be 'up' or 'down'.",
        ),
    ],
)
def test_options_that_the_schema_refuses_are_named_with_the_part(site, options, sentence):
    install_queue(site, WITH_OPTIONS)
    assert refusal(PluginOptionsError, PluginChoice("theirs", options)) == sentence


def test_an_option_without_a_default_must_be_given(site):
    install_queue(site, WITH_OPTIONS.replace("window: int = Field(default=8, ge=1)", "window: int"))
    assert refusal(PluginOptionsError, PluginChoice("theirs")) == (
        f"The option 'window' of {SUBJECT} is missing, and has no default."
    )


def test_a_part_without_options_says_so(site):
    install_queue(site, QUEUE)
    assert refusal(PluginOptionsError, PluginChoice("theirs", {"k": 1, "l": 2})) == (
        f"T{SUBJECT[1:]} takes no options, and was given 'k', 'l'."
    )
    assert refusal(PluginOptionsError, PluginChoice("fcfs", {"k": 1})).startswith(
        "The request queue fcfs (octavo.request_queues:FCFSQueue, from octavo "
    )


def test_a_part_whose_schema_has_no_field_takes_none(site):
    body = "    class Options(BaseModel): pass\n    def __init__(self, *, options): super().__init__()\n"
    install_queue(site, f"from pydantic import BaseModel\n{QUEUE}\n{body}")
    assert refusal(PluginOptionsError, PluginChoice("theirs", {"k": 1})) == (
        f"T{SUBJECT[1:]} does not take the option 'k'. It takes: none."
    )


@pytest.mark.parametrize("schema", ["dict", "5", "lambda **options: None"])
def test_a_schema_that_is_no_pydantic_model_is_refused(site, schema):
    install_queue(site, f"{QUEUE}\n    Options = {schema}\n")
    assert refusal(PluginContractError, PluginChoice("theirs")) == (
        f"T{SUBJECT[1:]} has Options that are not a pydantic model."
    )


# -- making it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("raise KeyError('no such thing')", "raised KeyError when it was made: 'no such thing'"),
        ("self.nothing", "raised AttributeError when it was made: 'Queue' object has no attribute 'nothing'"),
    ],
)
def test_a_part_that_cannot_be_made_is_broken_and_named(site, body, sentence):
    install_queue(site, f"{QUEUE}\n    def __init__(self): {body}\n")
    with pytest.raises(PluginBroken) as caught:
        choose(fresh_scan(), REQUEST_QUEUES, PluginChoice("theirs")).create()
    assert str(caught.value) == f"T{SUBJECT[1:]} {sentence}"
    assert caught.value.__cause__ is not None


def test_a_constructor_that_does_not_take_its_options_is_refused_before_it_is_called(site):
    schema = "    class Options(BaseModel):\n        k: int = 1\n"
    install_queue(site, f"from pydantic import BaseModel\n{QUEUE}\n{schema}")
    assert refusal(PluginContractError, PluginChoice("theirs")) == (
        f"T{SUBJECT[1:]} inherits __init__(), which cannot be called as __init__(options=...): got an unexpected "
        "keyword argument 'options'."
    )


def test_an_error_of_octavos_own_speaks_for_itself(site):
    body = "    def __init__(self):\n        raise MissingExtraError('It needs fastlib: pip install fastlib')\n"
    install_queue(site, f"from octavo.errors import MissingExtraError\n{QUEUE}\n{body}")
    with pytest.raises(OctavoError) as caught:
        choose(fresh_scan(), REQUEST_QUEUES, PluginChoice("theirs")).create()
    assert str(caught.value) == "It needs fastlib: pip install fastlib"


def test_a_module_that_observes_takes_no_options(site):
    install(site, "watch", "[octavo.hooks]\nwatch = watch_module\n", watch_module="contract_version = 1\n")
    with pytest.raises(PluginOptionsError) as caught:
        choose(fresh_scan(), HOOKS, PluginChoice("watch", {"k": 1}))
    assert str(caught.value) == "The observer watch (watch_module, from watch 1.0) takes no options, and was given 'k'."


def test_a_secret_option_is_not_in_what_is_said_of_it(site):
    source = QUEUE.replace("FCFSQueue\n", "FCFSQueue\nfrom pydantic import BaseModel, Field, SecretStr\n", 1)
    source += "    class Options(BaseModel):\n        key: SecretStr = Field(min_length=20)\n"
    source += "    def __init__(self, *, options):\n        super().__init__()\n"
    install_queue(site, source)
    said = refusal(PluginOptionsError, PluginChoice("theirs", {"key": "hunter2"}))
    assert (
        said
        == f"The option 'key' of {SUBJECT} is not valid: value should have at least 20 items after validation, not 7."
    )
    part = choose(fresh_scan(), REQUEST_QUEUES, PluginChoice("theirs", {"key": "a long enough password"}))
    assert "password" not in repr(part.options)


SECRETS = """
from pydantic import BaseModel, Field, SecretStr
from typing import Annotated

class Auth(BaseModel):
    key: {kind}
    size: int = 1
"""


@pytest.mark.parametrize(
    "kind", ["SecretStr = Field(min_length=20)", "Annotated[str, Field(repr=False, min_length=20)]"]
)
@pytest.mark.parametrize("given", [{"auth": {"key": "hunter2"}}, {"auth": "hunter2"}, {"auths": [{"key": "hunter2"}]}])
def test_a_secret_inside_of_an_option_is_not_in_what_is_said_of_it_either(site, kind, given):
    options = "    class Options(BaseModel):\n        auth: Auth | None = None\n        auths: list[Auth] = []\n"
    constructor = "    def __init__(self, *, options):\n        super().__init__()\n"
    install_queue(site, SECRETS.replace("{kind}", kind) + QUEUE + options + constructor)
    said = refusal(PluginOptionsError, PluginChoice("theirs", given))
    assert "not valid" in said
    assert "hunter2" not in said


ALIASES = """
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

class Queue(__import__("octavo.request_queues").request_queues.FCFSQueue):
    contract_version = 1

    class Options(BaseModel):
        {config}
        size: int = Field(default=1, {alias})

    def __init__(self, *, options):
        super().__init__()
        self.options = options
"""


@pytest.mark.parametrize(
    ("config", "alias", "taken", "refused"),
    [
        ("", "alias='tile'", ["tile"], ["size"]),
        ("", "validation_alias='tile'", ["tile"], ["size"]),
        ("", "validation_alias=AliasChoices('tile', 'block')", ["tile", "block"], ["size"]),
        ("model_config = ConfigDict(populate_by_name=True)", "alias='tile'", ["tile", "size"], ["block"]),
    ],
)
def test_an_option_is_taken_by_the_names_that_its_schema_reads_and_by_no_other(site, config, alias, taken, refused):
    install_queue(site, ALIASES.replace("{config}", config or "pass").replace("{alias}", alias))
    assert [options_of(PluginChoice("theirs", {name: 5})).size for name in taken] == [5] * len(taken)
    for name in refused:
        said = refusal(PluginOptionsError, PluginChoice("theirs", {name: 5}))
        assert said.startswith(f"T{SUBJECT[1:]} does not take the option {name!r}.")
        assert said.endswith(f"It takes: {', '.join(taken)}.")


def test_a_schema_that_raises_something_else_is_broken(site):
    options = "    class Options(BaseModel):\n        k: int = 1\n        @field_validator('k')\n"
    options += "        def check(cls, value): raise KeyError('oops')\n"
    constructor = "    def __init__(self, *, options):\n        super().__init__()\n"
    install_queue(site, f"from pydantic import BaseModel, field_validator\n{QUEUE}{options}{constructor}")
    assert refusal(PluginBroken, PluginChoice("theirs", {"k": 2})) == (
        f"T{SUBJECT[1:]} raised KeyError: 'oops' when it checked its options."
    )


@pytest.mark.parametrize("raised", ["SystemExit(0)", "__import__('asyncio').CancelledError()", "GeneratorExit()"])
def test_no_part_ends_the_program_when_it_is_made(site, raised):
    install_queue(site, f"{QUEUE}\n    def __init__(self): raise {raised}\n")
    with pytest.raises(PluginBroken, match=r"raised .* when it was made"):
        choose(fresh_scan(), REQUEST_QUEUES, PluginChoice("theirs")).create()


def test_an_error_whose_message_cannot_be_made_is_named_all_the_same(site):
    source = "class Odd(Exception):\n    def __str__(self): raise ValueError\n"
    install_queue(site, f"{source}{QUEUE}\n    def __init__(self): raise Odd\n")
    with pytest.raises(PluginBroken) as caught:
        choose(fresh_scan(), REQUEST_QUEUES, PluginChoice("theirs")).create()
    assert str(caught.value) == f"T{SUBJECT[1:]} raised Odd when it was made: (its message cannot be made)"
