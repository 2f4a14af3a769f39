"""Settings by name, flat or nested, and what is said when one is wrong."""

import math
import tomllib
from typing import Literal, get_args, get_origin

import pydantic
import pytest

from octavo.config import (
    CacheConfig,
    EngineConfig,
    PluginChoice,
    SchedulerConfig,
    environment_warnings,
    field_sections,
)
from octavo.errors import ConfigError

# A value of each field that is not its default. For parts also a name alone, and a table, are taken.
OTHER_VALUES = {
    "model": "some/model",
    "dtype": "bfloat16",
    "device": "cuda:1",
    "max_model_len": 4096,
    "seed": 2**63 - 1,
    "attention_backend": PluginChoice("flash"),
    "attention_backends": {"full_attention": PluginChoice("flash", {"tile": 64})},
    "model_impl": PluginChoice("llama"),
    "enforce_eager": True,
    "cudagraph_capture_sizes": (1, 2, 16),
    "hooks": (PluginChoice("metrics"), PluginChoice("trace", {"path": "x"})),
    "block_size": 32,
    "num_kv_blocks": 100,
    "kv_cache_memory_bytes": 2**40,
    "gpu_memory_utilization": 0.5,
    "cpu_memory_share": 0.125,
    "kv_cache_dtype": "fp8_e4m3",
    "kv_cache_scales": "per_head",
    "enable_prefix_caching": False,
    "disable_hybrid_kv_cache_manager": True,
    "verify_prefix_cache": True,
    "hash_function": PluginChoice("blake2b", {"size": 32}),
    "hash_seed": "shared",
    "kv_managers": {"full_attention": PluginChoice("mine")},
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "enable_chunked_prefill": False,
    "long_prefill_token_threshold": 64,
    "watermark": 0.125,
    "async_scheduling": True,
    "request_queue": PluginChoice("priority"),
}

# What a field has to have beside it, for without that it would mean nothing.
NEEDED_BESIDE = {"kv_cache_scales": {"kv_cache_dtype": "int8"}}


def value_of(config, name):
    section = field_sections()[name]
    return getattr(getattr(config, section) if section else config, name)


def as_toml(value):
    if isinstance(value, PluginChoice):
        return as_toml({"name": value.name, "options": value.options} if value.options else value.name)
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(item)}" for key, item in value.items()) + "}"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "octavo.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# All that go together: the size of the KV cache is given once.
TOGETHER = {name: value for name, value in OTHER_VALUES.items() if name != "kv_cache_memory_bytes"}


# -- flat and nested --------------------------------------------------------------------------------------------


def test_the_table_of_this_test_covers_every_field():
    assert list(OTHER_VALUES) == list(field_sections())
    default = EngineConfig()
    assert all(value_of(default, name) != value for name, value in OTHER_VALUES.items())


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_every_field_can_be_set_by_its_name_alone(name):
    needed = NEEDED_BESIDE.get(name, {})
    config = EngineConfig.from_flat(**{name: OTHER_VALUES[name]}, **needed)
    assert value_of(config, name) == OTHER_VALUES[name]
    default = EngineConfig()
    for other in OTHER_VALUES:
        if other != name:
            assert value_of(config, other) == needed.get(other, value_of(default, other))


def test_flat_names_and_sections_make_the_same_config():
    def of(wanted):
        return {name: value for name, value in TOGETHER.items() if field_sections()[name] == wanted}

    flat = EngineConfig.from_flat(**TOGETHER)
    nested = EngineConfig(**of(None), cache=CacheConfig(**of("cache")), scheduler=SchedulerConfig(**of("scheduler")))
    assert flat == nested


@pytest.mark.parametrize("left_out", ["num_kv_blocks", "kv_cache_memory_bytes"])
def test_a_file_with_all_fields_that_go_together_makes_the_same_config(write, left_out):
    values = {name: value for name, value in OTHER_VALUES.items() if name != left_out}
    lines = []
    for section in (None, "cache", "scheduler"):
        lines += [f"[{section}]"] if section else []
        lines += [f"{name} = {as_toml(value)}" for name, value in values.items() if field_sections()[name] == section]
    path = write("\n".join(lines))
    assert tomllib.loads(path.read_text())
    assert EngineConfig.from_toml(path) == EngineConfig.from_flat(**values)
    assert EngineConfig.from_toml(str(path)) == EngineConfig.from_toml(path)


def test_an_empty_file_is_the_default(write):
    assert EngineConfig.from_toml(write("")) == EngineConfig()


def test_files_are_utf_8_whatever_the_locale(write):
    assert EngineConfig.from_toml(write('model = "模型"')).model == "模型"


def test_some_settings_can_be_replaced_and_the_rest_stays():
    before = EngineConfig.from_flat(block_size=32, max_num_seqs=4, model="m", kv_managers={"full_attention": "a"})
    after = before.with_settings(block_size=8, seed=3)
    assert after == EngineConfig.from_flat(
        block_size=8, max_num_seqs=4, model="m", kv_managers={"full_attention": "a"}, seed=3
    )
    assert before.cache.block_size == 32
    nested = EngineConfig(cache=CacheConfig(block_size=32), scheduler=SchedulerConfig(max_num_seqs=4))
    assert nested.with_settings(seed=1) == EngineConfig.from_flat(block_size=32, max_num_seqs=4, seed=1)
    with pytest.raises(ConfigError, match="block_size is 0"):
        before.with_settings(block_size=0)


def test_a_config_cannot_change():
    config = EngineConfig()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.seed = 1
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.cache.block_size = 1


def test_configs_do_not_share_what_can_change():
    EngineConfig().cache.kv_managers["full_attention"] = "mine"
    assert EngineConfig().cache.kv_managers == {}


# -- fields -----------------------------------------------------------------------------------------------------


def test_no_two_sections_have_a_field_of_the_same_name():
    sections = {"cache": CacheConfig, "scheduler": SchedulerConfig}
    own = [name for name in EngineConfig.model_fields if name not in sections]
    names = [*own, *sections, *(name for section in sections.values() for name in section.model_fields)]
    assert len(names) == len(set(names))
    assert len(field_sections()) == len(names) - len(sections)


@pytest.mark.parametrize("section", [EngineConfig, CacheConfig, SchedulerConfig])
def test_every_field_has_a_sentence_for_the_help_and_the_docs(section):
    for name, field in section.model_fields.items():
        assert field.description, name
        assert field.description.rstrip().endswith("."), name


# -- what is wrong ----------------------------------------------------------------------------------------------


def message_of(call, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_a_misspelt_setting_is_met_with_the_closest_one():
    assert message_of(EngineConfig.from_flat, blok_size=16) == (
        "There is no setting called 'blok_size'. Did you mean 'block_size'?"
    )


LIKE_NO_OTHER = (
    "`octavo generate --help` lists all settings; an option of a part stands beside the part's name, in a table such "
    'as { name = "my_part", options = { size = 64 } }.'
)


def test_a_setting_that_is_like_no_other_may_be_an_option_of_a_part():
    sentence = f"There is no setting called 'ageing'. {LIKE_NO_OTHER}"
    assert message_of(EngineConfig.from_flat, ageing=1) == sentence
    assert message_of(EngineConfig().with_settings, ageing=1) == sentence


def test_the_size_of_the_kv_cache_is_given_once(write):
    sentence = "The size of the KV cache is given twice, by num_kv_blocks and by kv_cache_memory_bytes; leave one out."
    assert message_of(EngineConfig.from_flat, num_kv_blocks=8, kv_cache_memory_bytes=2**20) == sentence
    path = write("[cache]\nnum_kv_blocks = 8\nkv_cache_memory_bytes = 1048576\n")
    assert message_of(EngineConfig.from_toml, path) == f"In '{path}': {sentence}"
    before = EngineConfig.from_flat(num_kv_blocks=8)
    assert message_of(before.with_settings, num_kv_blocks=8, kv_cache_memory_bytes=2**20) == sentence
    one_is_none = EngineConfig.from_flat(num_kv_blocks=8, kv_cache_memory_bytes=None)
    assert (one_is_none.cache.num_kv_blocks, one_is_none.cache.kv_cache_memory_bytes) == (8, None)


@pytest.mark.parametrize(
    ("name", "other"), [("num_kv_blocks", "kv_cache_memory_bytes"), ("kv_cache_memory_bytes", "num_kv_blocks")]
)
def test_one_size_of_the_kv_cache_takes_the_place_of_the_other(write, name, other):
    changed = EngineConfig.from_toml(write(f"[cache]\n{other} = 100\n")).with_settings(**{name: 50})
    assert (value_of(changed, name), value_of(changed, other)) == (50, None)
    assert (changed.source_of(name), changed.source_of(other)) == ("argument", "default")
    # What says no size leaves the other as it is.
    before = EngineConfig.from_flat(**{other: 100})
    assert value_of(before.with_settings(**{name: None}), other) == 100
    assert value_of(before.with_settings(seed=1), other) == 100


@pytest.mark.parametrize("value", ["abc", "16", None, 1.5, True])
def test_a_value_that_might_have_had_several_types_is_met_with_one_sentence(value):
    assert message_of(EngineConfig.from_flat, max_model_len=value) == (
        f"max_model_len is {value!r}: input should be a valid integer or 'auto'."
    )


@pytest.mark.parametrize("kind", ["internal", "int", "literal"])
def test_a_kind_is_named_whatever_it_is_called(kind):
    assert message_of(EngineConfig.from_flat, kv_managers={kind: 5}) == (
        f"kv_managers.{kind} is 5: it must be a name, or a table such as "
        '{ name = "my_part", options = { size = 64 } }.'
    )


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (
            {"name": "priority", "ageing": "sesame"},
            "request_queue is a table of 'name', 'ageing': beside the name, a part's options stand in a table of their "
            "own; write options = { ageing = ... }.",
        ),
        (
            {"name": "mine", "size": 64, "options": {}, "depth": 2},
            "request_queue is a table of 'name', 'size', 'options', 'depth': beside the name, a part's options stand "
            "in a table of their own; write options = { size = ..., depth = ... }.",
        ),
        (
            {"name": "mine", "option": {"size": 64}},
            "request_queue is a table of 'name', 'option': beside 'name' it may have 'options' alone.",
        ),
    ],
)
def test_options_outside_their_table_are_met_with_their_place(choice, sentence):
    assert message_of(EngineConfig.from_flat, request_queue=choice) == sentence


class Mine:
    """Somebody's part."""

    def __repr__(self):
        return "Mine()"


@pytest.mark.parametrize("given", [Mine, Mine(), math], ids=["class", "object", "module"])
@pytest.mark.parametrize("name", ["hooks", "hash_function", "kv_managers"])
def test_a_part_that_is_not_a_name_has_to_be_registered_first(name, given):
    value, shown = {
        "hooks": ([given], "hooks.0"),
        "hash_function": (given, "hash_function"),
        "kv_managers": ({"full_attention": given}, "kv_managers.full_attention"),
    }[name]
    assert message_of(EngineConfig.from_flat, **{name: value}) == (
        f"{shown} is {given!r}: it must be the name of a part, under which a package registers it as an entry point; "
        "octavo.testing.installed registers one without a package."
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("modle = 'm'", "There is no setting called 'modle'. Did you mean 'model'?"),
        ("[cache]\nblok_size = 1", "There is no setting called 'cache.blok_size'. Did you mean 'block_size'?"),
        ("[cach]\nblock_size = 1", "There is no setting called 'cach'. Did you mean 'cache'?"),
        (
            "[scheduler]\nrequest_queue = 'priority'\nageing = 3",
            f"There is no setting called 'scheduler.ageing'. {LIKE_NO_OTHER}",
        ),
        ("block_size = 1", "'block_size' belongs in the section [cache]."),
        (
            "[cache]\nmax_num_seqs = 1",
            "'max_num_seqs' belongs in the section [scheduler].",
        ),
        (
            "[scheduler]\nseed = 1",
            "'seed' belongs at the top, before any section.",
        ),
        ("[cache]\nblock_size = 0", "block_size is 0: input should be greater than or equal to 1."),
        ("cache = 5", "cache is 5: input should be a valid dictionary or instance of CacheConfig."),
        (
            "seed = -1\n[cache]\nblock_size = 0",
            "seed is -1: input should be greater than or equal to 0. "
            "block_size is 0: input should be greater than or equal to 1.",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_section(write, text, sentence):
    path = write(text)
    assert message_of(EngineConfig.from_toml, path) == f"In '{path}': {sentence}"


def test_a_choice_that_is_wrong_in_a_file_is_named_with_the_file(write):
    path = write('hooks = ["metrics", { nome = "trace" }]')
    assert message_of(EngineConfig.from_toml, path) == (
        f"In '{path}': hooks.1 is a table of 'nome': it must be a name, or a table such as "
        '{ name = "my_part", options = { size = 64 } }.'
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path, write):
    missing = tmp_path / "none.toml"
    assert message_of(EngineConfig.from_toml, missing).startswith(f"The config file '{missing}' cannot be read: ")
    path = write("= 5")
    assert message_of(EngineConfig.from_toml, path).startswith(f"The config file '{path}' cannot be read: Invalid")
    path.write_bytes(b'model = "\xff"')
    assert message_of(EngineConfig.from_toml, path).startswith(f"The config file '{path}' cannot be read: 'utf-8'")
    assert message_of(EngineConfig.from_toml, tmp_path).startswith(f"The config file '{tmp_path}' cannot be read: ")


WRONG = {
    "model": [5, True],
    "dtype": ["int8", "fp16", None, 16],
    "device": [0, None],
    "max_model_len": ["long", "16", 1.5, True, None],
    "seed": [-1, 2**63, 1.5, "7", True, None],
    "attention_backend": [None, 5, "", {"nome": "flash"}, {"name": "flash", "options": {}, "more": 1}],
    "attention_backends": ["flash", None, {"full_attention": 5}, {5: "flash"}],
    "model_impl": [None, 5],
    "enforce_eager": [0, 1, "yes", None],
    "cudagraph_capture_sizes": [4, "1,2", [], (), [0], [-8], [1, True], [1.0], ["1"], {1: 2}],
    "hooks": [None, 5, [5], ["metrics", ""], [["metrics"]], {"metrics": {}}],
    "block_size": [0, -1, 1025, 16.0, "16", True, None],
    "num_kv_blocks": [1, 0, -5, True, "8"],
    "kv_cache_memory_bytes": [0, -1, 1e9, "1GB", True],
    "gpu_memory_utilization": [0, -0.1, 1.01, math.nan, math.inf, "0.9", True, None],
    "cpu_memory_share": [0, 1.01, math.nan, "0.9", True, None],
    "kv_cache_dtype": ["fp8", "int4", "fp8_e4m3_per_token_head", None],
    "kv_cache_scales": ["per_token", "none", 1.0, None],
    "enable_prefix_caching": [0, 1, "yes", None],
    "disable_hybrid_kv_cache_manager": [0, 1, "yes", None],
    "verify_prefix_cache": [0, 1, "yes", None],
    "hash_function": [None, 5],
    "hash_seed": [5, True],
    "kv_managers": ["full_attention=mine", 5, None, {"full_attention": 5}, {5: "mine"}],
    "max_num_seqs": [0, -1, 65537, True, None],
    "max_num_batched_tokens": [0, -1, True, None],
    "enable_chunked_prefill": [0, "no", None],
    "long_prefill_token_threshold": [-1, 1.5, "64", True, None],
    "watermark": [-0.1, 1, 1.5, math.nan, math.inf, "0.1", True, None],
    "async_scheduling": [0, 1, "yes", None],
    "request_queue": [None, 5],
}


@pytest.mark.parametrize("model", [EngineConfig, CacheConfig, SchedulerConfig])
def test_a_field_says_which_words_it_may_be(model):
    for name, field in model.model_fields.items():
        annotations = (field.annotation, *get_args(field.annotation))
        words = [word for kind in annotations if get_origin(kind) is Literal for word in get_args(kind)]
        assert [word for word in words if f'"{word}"' not in field.description] == [], name


def test_every_field_is_tried_with_wrong_values():
    assert list(WRONG) == list(field_sections())


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_that_cannot_be_is_refused_by_name_and_never_turned_into_another(name, value):
    assert message_of(EngineConfig.from_flat, **{name: value}).startswith((f"{name} is ", f"{name}."))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 1),
        ("block_size", 1024),
        ("num_kv_blocks", 2),
        ("gpu_memory_utilization", 1),
        ("gpu_memory_utilization", 1.0),
        ("max_num_seqs", 65536),
        ("max_num_batched_tokens", 1),
        ("seed", 0),
        ("max_model_len", "auto"),
        ("hash_seed", None),
    ],
)
def test_a_value_at_its_limit_is_taken(name, value):
    assert value_of(EngineConfig.from_flat(**{name: value}), name) == value


def test_a_path_that_no_file_can_have_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        EngineConfig.from_toml("/no\0pe")


# -- where a setting was written --------------------------------------------------------------------------------


def test_a_setting_says_where_it_was_written(write):
    path = write("seed = 3\n[cache]\nblock_size = 32\n[scheduler]\nrequest_queue = 'mine'\n")
    config = EngineConfig.from_toml(path)
    written = ("seed", "block_size", "request_queue")
    assert {config.source_of(name) for name in written} == {str(path)}
    assert {config.source_of(name) for name in field_sections() if name not in written} == {"default"}
    assert EngineConfig.from_flat(block_size=32).source_of("block_size") == "argument"
    assert EngineConfig(cache=CacheConfig(block_size=32)).source_of("block_size") == "argument"
    assert EngineConfig(cache=CacheConfig(block_size=32)).source_of("seed") == "default"


def test_a_setting_that_is_replaced_says_where_its_last_value_was_written(write):
    config = EngineConfig.from_toml(write("seed = 3\n[cache]\nblock_size = 32\n"))
    changed = config.with_settings(block_size=8, max_num_seqs=2)
    assert changed.source_of("seed") == config.source_of("seed") != "argument"
    assert changed.source_of("block_size") == changed.source_of("max_num_seqs") == "argument"
    named = changed.with_sources({"block_size": "flag --block-size"})
    assert named.source_of("block_size") == "flag --block-size"
    assert named.source_of("seed") == config.source_of("seed")
    assert changed.source_of("block_size") == "argument"


def test_configs_that_ask_for_the_same_are_equal_wherever_it_was_written(write):
    from_file = EngineConfig.from_toml(write("[cache]\nblock_size = 32\n"))
    from_arguments = EngineConfig.from_flat(block_size=32)
    assert from_file == from_arguments == from_arguments.with_sources({"block_size": "flag --block-size"})
    assert from_file != EngineConfig.from_flat(block_size=16)


def test_single_observers_need_no_list():
    assert EngineConfig.from_flat(hooks="metrics").hooks == (PluginChoice("metrics"),)
    assert EngineConfig.from_flat(hooks={"name": "metrics"}).hooks == (PluginChoice("metrics"),)
    assert EngineConfig.from_flat(hooks=["a", PluginChoice("b")]).hooks == (PluginChoice("a"), PluginChoice("b"))


@pytest.mark.parametrize("nobody", [[], ()])
def test_an_empty_list_is_no_observer(nobody):
    assert EngineConfig.from_flat(hooks=nobody).hooks == ()


@pytest.mark.parametrize("nothing", [None, ""])
def test_nothing_is_no_list_of_observers(nothing):
    assert message_of(EngineConfig.from_flat, hooks=nothing) == (
        f"hooks is {nothing!r}: it must be a list of names, and an empty list for none."
    )


@pytest.mark.parametrize("name", ["attention_backend", "model_impl", "hash_function", "request_queue"])
def test_a_part_may_be_written_as_its_name_alone(name):
    assert EngineConfig.from_flat(**{name: "mine"}) == EngineConfig.from_flat(**{name: PluginChoice("mine")})
    for kinds in ("attention_backends", "kv_managers"):
        by_name = EngineConfig.from_flat(**{kinds: {"full_attention": "mine"}})
        assert by_name == EngineConfig.from_flat(**{kinds: {"full_attention": {"name": "mine"}}})


# -- the environment --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "way_out"),
    [
        (
            "OCTAVO_ATTENTION_BAKEND",
            "pass attention_backend as an argument, as the flag --attention-backend, or in a config file",
        ),
        ("OCTAVO_BLOCK_SIZE", "pass block_size as an argument, as the flag --block-size, or in a config file"),
        ("OCTAVO_ZZZ", "unset it"),
        ("OCTAVO_", "unset it"),
    ],
)
def test_a_variable_that_looks_like_a_setting_is_said_to_have_no_effect(variable, way_out):
    assert environment_warnings({variable: "1", "PATH": "/bin", "MY_OCTAVO_SEED": "1", "octavo_seed": "1"}) == [
        f"The environment variable {variable} has no effect: Octavo takes no settings from there; {way_out}."
    ]


def test_several_variables_are_named_in_order_and_others_not():
    sentences = environment_warnings({"OCTAVO_SEED": "1", "VLLM_SEED": "1", "OCTAVO_DTYPE": "x"})
    assert [sentence.split()[3] for sentence in sentences] == ["OCTAVO_DTYPE", "OCTAVO_SEED"]
    assert environment_warnings({"HOME": "/", "OCTAV": "1"}) == []


def test_the_environment_is_that_of_the_process(monkeypatch):
    monkeypatch.setenv("OCTAVO_ZZZ", "1")
    assert any("OCTAVO_ZZZ" in sentence for sentence in environment_warnings())


# -- scales of the KV cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["per_tensor", "per_head", "per_token_head"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16"])
def test_scales_of_what_has_none_are_refused(dtype, scales):
    assert message_of(EngineConfig.from_flat, kv_cache_dtype=dtype, kv_cache_scales=scales) == (
        f"kv_cache_scales is {scales!r}, and kv_cache_dtype {dtype!r} has no scales; set kv_cache_dtype to 'fp8_e4m3' "
        "or 'int8', or leave kv_cache_scales out."
    )


@pytest.mark.parametrize("scales", ["auto", "per_tensor", "per_head", "per_token_head"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_every_quantised_dtype_takes_each_kind_of_scales(dtype, scales):
    config = EngineConfig.from_flat(kv_cache_dtype=dtype, kv_cache_scales=scales)
    assert (config.cache.kv_cache_dtype, config.cache.kv_cache_scales) == (dtype, scales)
