"""From a config to an engine: what is chosen, how large it is, and what is said when it cannot be."""

import logging
import os

import pytest

from octavo.assembly import build_engine
from octavo.attention_backends.torch_sdpa import TorchSDPABackend
from octavo.config import EngineConfig
from octavo.core.interfaces import AttentionBackend, HashFunction
from octavo.errors import (
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    NotEnoughMemoryError,
    PluginBroken,
    PluginContractError,
    UnsupportedModelError,
)
from octavo.testing import installed, tiny_models

# Two layers of 2 heads of 16 numbers, keys and values, in float32: 512 bytes a token, 8192 a block of 16.
BYTES_PER_BLOCK = 2 * 2 * 16 * 2 * 16 * 4


def build(folder, **settings):
    return build_engine(EngineConfig.from_flat(model=str(folder), **settings))


def test_a_given_number_of_blocks_is_what_there_is(tiny_folder):
    assembly = build(tiny_folder, num_kv_blocks=40)
    assert assembly.kv_cache_config.num_blocks == 40
    assert assembly.kv_cache_config.bytes_per_block == BYTES_PER_BLOCK
    assert assembly.engine.stats().free_blocks == 39
    (group,) = assembly.selection.groups
    assert (group.backend.part.plugin.name, group.manager.part.plugin.name) == ("torch_sdpa", "full_attention")


def test_given_bytes_are_turned_into_blocks(tiny_folder):
    assert build(tiny_folder, kv_cache_memory_bytes=50 * BYTES_PER_BLOCK + 1).kv_cache_config.num_blocks == 50


def test_without_a_size_a_share_of_the_free_memory_is_taken(tiny_folder, monkeypatch):
    monkeypatch.setattr("octavo.core.memory.cpu_free_bytes", lambda: 1000 * BYTES_PER_BLOCK)
    assert build(tiny_folder).kv_cache_config.num_blocks == 250
    assert build(tiny_folder, cpu_memory_share=0.5).kv_cache_config.num_blocks == 500


def test_auto_length_is_the_models_own_where_that_fits_and_what_fits_elsewhere(tiny_folder):
    assert build(tiny_folder, num_kv_blocks=100).engine.max_model_len == 512
    assert build(tiny_folder, num_kv_blocks=11).engine.max_model_len == 160
    assert build(tiny_folder, kv_cache_memory_bytes=8 * BYTES_PER_BLOCK).engine.max_model_len == 112


def test_a_length_that_does_not_fit_is_refused_with_one_that_does(tiny_folder):
    memory = 8 * BYTES_PER_BLOCK
    with pytest.raises(NotEnoughMemoryError, match=r"Set max_model_len=112 or max_model_len='auto'") as caught:
        build(tiny_folder, kv_cache_memory_bytes=memory, max_model_len=512)
    assert str(33 * BYTES_PER_BLOCK) in str(caught.value)
    assert str(memory) in str(caught.value)
    assert caught.value.max_model_len_that_fits == 112
    assert build(tiny_folder, kv_cache_memory_bytes=memory, max_model_len=112).engine.max_model_len == 112
    with pytest.raises(NotEnoughMemoryError):
        build(tiny_folder, kv_cache_memory_bytes=memory, max_model_len=113)


def test_memory_for_not_even_one_block_is_refused(tiny_folder):
    with pytest.raises(NotEnoughMemoryError, match=r"requests of up to 0 tokens\. Lower block_size"):
        build(tiny_folder, kv_cache_memory_bytes=10)


def test_an_explicit_number_of_blocks_below_one_long_request_warns_and_starts(tiny_folder, caplog):
    with caplog.at_level(logging.WARNING):
        assembly = build(tiny_folder, num_kv_blocks=8, max_model_len=512)
    assert "num_kv_blocks=8 holds 7 usable blocks, and one request of max_model_len=512 takes 32" in caplog.text
    assert assembly.engine.max_model_len == 512


@pytest.mark.parametrize("length", [0, 1, 513])
def test_a_length_that_the_models_positions_do_not_allow_is_refused(tiny_folder, length):
    with pytest.raises(ConfigError, match=f"max_model_len is {length}; it must be from 2 .* to 512"):
        build(tiny_folder, num_kv_blocks=50, max_model_len=length)


@pytest.mark.parametrize(
    "settings", [{"num_kv_blocks": 10**13}, {"kv_cache_memory_bytes": 10**19}, {"num_kv_blocks": 2**70}]
)
def test_a_size_that_no_memory_holds_is_refused_before_it_is_taken(tiny_folder, settings):
    with pytest.raises(NotEnoughMemoryError, match="Lower num_kv_blocks or kv_cache_memory_bytes"):
        build(tiny_folder, **settings)


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        build(tmp_path / "nowhere")


def test_a_model_type_that_nobody_knows_is_named(tiny_folder, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = (folder / "config.json").read_text().replace('"llama"', '"nonesuch"')
    (folder / "config.json").write_text(config)
    with pytest.raises(UnsupportedModelError, match="nonesuch"):
        build(folder)


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("gpu", "torch does not know"),
        ("cuda", "torch sees no GPU here"),
        ("meta", "runs on 'cpu' and on 'cuda'"),
        ("cpu:7", "runs on 'cpu'"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(tiny_folder, device, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(tiny_folder, device=device)


def test_salts_are_refused_with_a_weak_hash_function(tiny_folder):
    engine = build(tiny_folder, num_kv_blocks=20, hash_function="xxh3_128").engine
    with pytest.raises(InvalidRequestError, match="choose hash_function='sha256'"):
        engine.add_request("r", [5], _params(), cache_salt="tenant")


def test_a_hash_seed_makes_two_engines_agree_and_without_one_they_do_not(tiny_folder, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def keys(**settings):
        engine = build(tiny_folder, num_kv_blocks=20, **settings).engine
        engine.add_request("r", range(20), _params())
        engine.step()
        found = set(engine.scheduler.kv_cache_manager.pool.cached_blocks())
        engine.abort_request("r")
        return found

    assert keys(hash_seed="a") == keys(hash_seed="a") != keys(hash_seed="b")
    assert keys() != keys()
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert keys() == keys(hash_seed="5")


# -- parts that do not fit ----------------------------------------------------------------------------------------


@pytest.fixture
def no_weights(monkeypatch):
    """Fails the test as soon as a weight is read."""

    def read(self, *arguments):
        pytest.fail("a weight was read")

    monkeypatch.setattr("octavo.models.safetensors_checkpoint.SafetensorsCheckpoint.tensor", read)


class OddHash(HashFunction):
    contract_version = 1
    answer = staticmethod(lambda data: b"")

    def digest(self, data):
        return self.answer(data)


def refusal(error, folder, group, part, **settings):
    with installed({f"octavo.{group}": {"odd": part}}), pytest.raises(error) as caught:
        build(folder, num_kv_blocks=20, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda data: b"short", "returns b'short' as a digest; it must be bytes, at least 16 of them."),
        (lambda data: "x" * 32, f"returns {'x' * 32!r} as a digest; it must be bytes, at least 16 of them."),
        (
            lambda data: b"x" * (16 + len(data)),
            "returns digests of [16, 17, 22, 2320] bytes, 4 different ones for 4 inputs; each input must have its own, "
            "and all must be of one length.",
        ),
        (
            lambda data: b"x" * 16,
            "returns digests of [16, 16, 16, 16] bytes, 1 different ones for 4 inputs; each input must have its own, "
            "and all must be of one length.",
        ),
        (
            lambda data: os.urandom(16),
            "returns another digest when it is asked again; the same bytes must give the same one.",
        ),
    ],
    ids=["too short", "text", "of several lengths", "always the same", "never the same"],
)
def test_a_hash_function_that_makes_no_keys_is_refused_before_a_weight_is_read(
    tiny_folder, no_weights, monkeypatch, answer, sentence
):
    monkeypatch.setattr(OddHash, "answer", staticmethod(answer))
    said = refusal(PluginContractError, tiny_folder, "hash_functions", OddHash, hash_function="odd")
    assert said == f"The hash function OddHash {sentence}"


def test_a_hash_function_that_raises_is_blamed_before_a_weight_is_read(tiny_folder, no_weights, monkeypatch):
    monkeypatch.setattr(OddHash, "answer", staticmethod(lambda data: 1 / 0))
    assert refusal(PluginBroken, tiny_folder, "hash_functions", OddHash, hash_function="odd") == (
        "The hash function odd (octavo_testing_on_trial:OddHash, from on-trial 0.0.0) raised ZeroDivisionError when it "
        "made a digest: division by zero"
    )


BACKEND = "The attention backend odd (octavo_testing_on_trial:{}, from on-trial 0.0.0) raised"


def test_a_backend_whose_layout_does_not_fit_its_page_is_blamed_before_a_weight_is_read(tiny_folder, no_weights):
    class Wide(TorchSDPABackend):
        contract_version = 1
        bind = AttentionBackend.bind

        def kv_cache_shape(self, spec, num_blocks):
            return (num_blocks, 3, spec.block_size, self.spec.num_kv_heads, self.spec.head_dim)

    said = refusal(PluginBroken, tiny_folder, "attention_backends", Wide, attention_backend="odd")
    assert said.startswith(f"{BACKEND.format('Wide')} RuntimeError when it was given a layer's memory: ")


def test_a_backend_that_cannot_bind_is_blamed_before_a_weight_is_read(tiny_folder, no_weights):
    class Unbound(TorchSDPABackend):
        contract_version = 1

        def bind(self, rows, spec):
            raise KeyError("layout")

    assert refusal(PluginBroken, tiny_folder, "attention_backends", Unbound, attention_backend="odd") == (
        f"{BACKEND.format('Unbound')} KeyError when it was given a layer's memory: 'layout'"
    )


def test_a_backend_is_tried_with_two_blocks_of_zeros_as_large_as_a_page(tiny_folder):
    tried = []

    class Watched(TorchSDPABackend):
        contract_version = 1

        def bind(self, rows, spec):
            tried.append((tuple(rows.shape), str(rows.dtype), bool(rows.any())))
            return super().bind(rows, spec)

    with installed({"octavo.attention_backends": {"odd": Watched}}):
        build(tiny_folder, num_kv_blocks=20, attention_backend="odd")
    # Once for the try, then for each of the two layers.
    page_bytes = BYTES_PER_BLOCK // 2
    assert tried == [((2, page_bytes), "torch.uint8", False), *[((20, page_bytes), "torch.uint8", False)] * 2]


@pytest.mark.parametrize(("is_disabled", "kind"), [(False, "sliding_window"), (True, "full_attention")])
def test_windows_keep_no_more_than_they_read_unless_that_is_disabled(is_disabled, kind, tmp_path):
    folder = tiny_models.tiny_mistral(tmp_path)
    assembly = build(folder, num_kv_blocks=20, disable_hybrid_kv_cache_manager=is_disabled)
    assert [group.spec.kind for group in assembly.kv_cache_config.groups] == [kind]


def test_the_size_that_was_chosen_is_logged(tiny_folder, caplog):
    with caplog.at_level(logging.INFO, "octavo"):
        build(tiny_folder, num_kv_blocks=20)
    assert caplog.records[-1].getMessage() == (
        f"model {tiny_folder} on cpu in float32; KV cache of 20 blocks of 16 tokens, 160.00 KiB; requests of up to 304 "
        "tokens"
    )


def test_the_groups_of_a_model_with_several_are_logged_and_what_lies_idle_is_warned_of(tmp_path, caplog):
    # Five layers: those with windows have two slots, and the one without has a layer for one of them.
    folder = tiny_models.tiny_qwen2(
        tmp_path, num_hidden_layers=5, use_sliding_window=True, sliding_window=16, max_window_layers=3
    )
    with caplog.at_level(logging.INFO, "octavo"):
        build(folder, num_kv_blocks=200, max_model_len=512)
    groups, warning = (
        record for record in caplog.records if "2 groups" in record.getMessage() or "idle" in record.getMessage()
    )
    assert (groups.levelname, groups.getMessage()) == (
        "INFO",
        "one pool for 2 groups of full_attention (1 or 2 layers each, blocks of 16 tokens), 1 group of sliding_window "
        "(2 layers, blocks of 16 tokens)",
    )
    # 32 blocks of 96, half of each.
    assert (warning.levelname, warning.getMessage()) == (
        "WARNING",
        "16.7% of the KV cache that a request of 512 tokens holds lies idle, for a block is as large as the largest "
        "group needs it: a group of full_attention has 1 layer for 2 slots. `octavo plan` shows each group, and what "
        "disable_hybrid_kv_cache_manager would take instead.",
    )


def test_a_model_whose_layers_keep_the_same_is_not_warned_of(tiny_folder, caplog):
    with caplog.at_level(logging.INFO, "octavo"):
        build(tiny_folder, num_kv_blocks=20)
    assert not [record for record in caplog.records if "idle" in record.getMessage() or "pool" in record.getMessage()]


def _params():
    from octavo import SamplingParams

    return SamplingParams(temperature=0, max_tokens=2)


def test_ids_that_the_model_cannot_generate_end_nothing(tiny_folder, monkeypatch):
    from octavo.models.safetensors_checkpoint import SafetensorsCheckpoint

    monkeypatch.setattr(SafetensorsCheckpoint, "eos_token_ids", frozenset({-1, 2, 511, 512, 10**6}))
    assert build(tiny_folder, num_kv_blocks=20).engine.eos_token_ids == {2, 511}
