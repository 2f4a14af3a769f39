"""`octavo plan`: what a KV cache of some size holds."""

import dataclasses
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fake_packages import install

import octavo
from octavo.assembly import build_engine
from octavo.cli.app import run
from octavo.config import EngineConfig
from octavo.core.interfaces.kv_scales import LayerScales
from octavo.core.kv_cache_config import KVCacheGroup
from octavo.testing.tiny_models import add_kv_scales

OWN = f"octavo {octavo.__version__}"
# The tiny Llama: two layers of 2 heads of 16 numbers, keys and values, in float32.
PAGE_BYTES = 2 * 16 * 2 * 16 * 4
BYTES_PER_BLOCK = 2 * PAGE_BYTES

# A config of 32 layers, 8 KV heads and head_dim 128.
LARGE = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 4096,
    "intermediate_size": 64,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "float16",
}


@pytest.fixture
def config_file(tmp_path):
    """Writes the large config, with some values changed, and returns the file."""

    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in (LARGE | changes).items() if value is not None}))
        return str(path)

    return write


@pytest.fixture
def planned(capsys):
    """Runs the command and returns what a program gets."""

    def plan(*arguments):
        assert run(["plan", *map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return plan


@pytest.fixture
def refused(capsys):
    """Runs the command and returns the one line that says why not."""

    def plan(*arguments):
        assert run(["plan", *map(str, arguments)]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == 1
        return shown.err.removeprefix("octavo: ").removesuffix("\n")

    return plan


# -- what is shown ----------------------------------------------------------------------------------------------


def test_the_whole_answer(tiny_folder, capsys):
    assert run(["plan", str(tiny_folder), "--memory", str(2**20 + 100), "--max-num-seqs", "3"]) == 0
    assert (
        capsys.readouterr().out
        == f"""\
{tiny_folder} on cpu in float32, KV cache in float32, model class llama ({OWN}), by default; 'auto': model_type is \
'llama'

memory           1.00 MiB (1048676 bytes), given by --memory
blocks           128 of 8.00 KiB (8192 bytes), one of them the null block
bytes a token    512 bytes
longest request  512 tokens, as long as the model's positions go

full_attention (layers 0-1), each keeps FullAttentionSpec(block_size=16, num_kv_heads=2, head_dim=16, dtype='float32')
  KV-cache manager   full_attention ({OWN}), by default; named as what the layers keep
  bytes a token      512 bytes in layers 0-1
  bytes a page       4.00 KiB (4096 bytes), for a block of 16 tokens in one layer
  a request          of 512 tokens holds at most 32 blocks, 256.00 KiB (262144 bytes)

where the memory goes
  a request of 512 tokens  ##########                                 25.0%  256.00 KiB
  further requests         ##############################             74.2%  760.00 KiB
  the null block           .                                           0.8%  8.00 KiB
  left over                .                                           0.0%  100 bytes

requests at a time, by their length, when they share no blocks
  512 tokens, 32 blocks  ########################################  3
  maximum concurrency for 512 tokens a request: 3.96x
"""
    )


def test_each_length_has_a_bar_and_what_never_fits_has_none(config_file, capsys):
    arguments = ["--num-kv-blocks", "200", "--max-model-len", "4096", "--max-num-seqs", "2"]
    assert run(["plan", config_file(), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:7] == [
        "memory           800.00 MiB (838860800 bytes), num_kv_blocks by flag --num-kv-blocks",
        "blocks           200 of 4.00 MiB (4194304 bytes), one of them the null block",
        "bytes a token    256.00 KiB (262144 bytes)",
        "longest request  3184 tokens, which is what the memory holds; the model's positions go up to 8192",
        "max_model_len    4096 tokens, by flag --max-model-len",
    ]
    assert lines[lines.index("where the memory goes") :] == [
        "where the memory goes",
        "  usable blocks   ########################################   99.5%  796.00 MiB",
        "  the null block  .                                           0.5%  4.00 MiB",
        "",
        "requests at a time, by their length, when they share no blocks",
        "   512 tokens,  32 blocks  ########################################  6",
        "  1024 tokens,  64 blocks  ####################                      3",
        "  2048 tokens, 128 blocks  #######                                   1",
        "  4096 tokens, 256 blocks                                            0",
        "  An engine runs at most 2 at a time (max_num_seqs).",
        "  maximum concurrency for 4096 tokens a request: 0.77x",
        "  A request that grows past the longest one that fits ends with finish_reason 'length' when the KV cache is "
        "full.",
    ]


def test_of_lengths_that_never_fit_the_shortest_is_shown_alone(config_file, planned, capsys):
    arguments = [config_file(), "--num-kv-blocks", "40", "--max-model-len", "8192"]
    lines = lines_of(capsys, *arguments)
    first = lines.index("requests at a time, by their length, when they share no blocks") + 1
    assert lines[first:] == [
        "   512 tokens, 32 blocks  ########################################  1",
        "  1024 tokens, 64 blocks                                            0",
        "  maximum concurrency for 8192 tokens a request: 0.07x",
        "  A request that grows past the longest one that fits ends with finish_reason 'length' when the KV cache is "
        "full.",
    ]
    # A program gets all of them.
    assert [row["num_requests"] for row in planned(*arguments)["concurrency"]] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        ({"max-num-batched-tokens": 3}, "  An engine runs at most 3 at a time (max_num_batched_tokens)."),
        ({"max-num-seqs": 3}, "  An engine runs at most 3 at a time (max_num_seqs)."),
        (
            {"max-num-batched-tokens": 4, "max-num-seqs": 4},
            "  An engine runs at most 4 at a time (max_num_seqs, max_num_batched_tokens).",
        ),
        ({"max-num-batched-tokens": 6, "max-num-seqs": 7}, None),
    ],
    ids=str,
)
def test_no_more_run_than_slots_and_than_a_step_has_tokens(config_file, planned, capsys, limits, line):
    arguments = [config_file(), "--num-kv-blocks", "200", *(f"--{name}={value}" for name, value in limits.items())]
    assert planned(*arguments)["max_running_requests"] == min(limits.values())
    assert run(["plan", *arguments]) == 0
    assert [said for said in capsys.readouterr().out.splitlines() if "at most" in said and "time" in said] == (
        [line] if line else []
    )


def test_a_single_one_is_not_said_as_several(config_file, capsys):
    assert run(["plan", config_file(), "--num-kv-blocks", "2", "--block-size", "1", "--max-model-len", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  bytes a page       8.00 KiB (8192 bytes), for a block of 1 token in one layer" in lines
    arguments = ["--memory", "8388609", "--max-model-len", "16"]
    assert run(["plan", config_file(), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  a request          of 16 tokens holds at most 1 block, 4.00 MiB (4194304 bytes)" in lines
    assert lines[lines.index("where the memory goes") + 4].endswith("  1 byte")


def test_nearly_one_more_request_is_not_rounded_up(config_file, capsys):
    # 1023 usable blocks, and 256 a request.
    assert run(["plan", config_file(max_position_embeddings=4096), "--num-kv-blocks", "1024"]) == 0
    assert capsys.readouterr().out.endswith("\n  maximum concurrency for 4096 tokens a request: 3.99x\n")


def test_a_program_gets_the_same(config_file, planned):
    file = config_file()
    answer = planned(file, "--memory", "1GiB", "--kv-cache-dtype", "float16")
    concurrency = answer.pop("concurrency")
    (group,) = answer.pop("groups")
    assert answer == {
        "model": file,
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_dtype": "float16",
        "kv_cache_scales": None,
        "model_class": "llama",
        "memory_bytes": 2**30,
        "memory_source": "given by --memory",
        "num_blocks": 512,
        "num_usable_blocks": 511,
        "bytes_per_token": 131072,
        "lasting_bytes_per_token": 131072,
        "hit_alignment": 16,
        "bytes_per_block": 2**21,
        "total_bytes": 2**30,
        "unused_bytes": 0,
        "max_position": 8192,
        "longest_request": 8176,
        "max_model_len": 8176,
        "max_model_len_source": "default",
        "blocks_per_request": 511,
        "bytes_per_request": 511 * 2**21,
        "idle_share": 0.0,
        "max_concurrency": 1.0,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_running_requests": 64,
        "disable_hybrid_kv_cache_manager": False,
        "switched": None,
        "unquantised": None,
    }
    assert type(answer["bytes_per_token"]) is type(group["bytes_per_token"]) is int
    assert group == {
        "kind": "full_attention",
        "num_groups": 1,
        "layers": list(range(32)),
        "layers_by_group": [list(range(32))],
        "spec": {
            "class": "FullAttentionSpec",
            "block_size": 16,
            "num_kv_heads": 8,
            "head_dim": 128,
            "dtype": "float16",
        },
        "stated_block_size": 16,
        "windows": [None] * 32,
        "chunks": [None] * 32,
        "manager": "full_attention",
        "page_bytes": 65536,
        "scale_bytes": 0,
        "bytes_per_token": 131072,
        "is_bounded": False,
        "unused_bytes_per_block": [0],
        "blocks_per_request": 511,
        "bytes_per_request": 511 * 2**21,
    }
    assert [row["num_tokens"] for row in concurrency] == [512, 1024, 2048, 4096, 8176, 8192]
    assert concurrency[3] == {
        "num_tokens": 4096,
        "blocks_per_request": 256,
        "bytes_per_request": 512 * 2**20,
        "num_requests": 1,
        "exact": 511 / 256,
    }


def test_a_program_is_told_who_set_the_longest_request(config_file, planned, tmp_path):
    file = tmp_path / "octavo.toml"
    file.write_text("max_model_len = 100\n")
    arguments = [config_file(), "--memory", "1GiB", "--config", file]
    assert planned(*arguments)["max_model_len_source"] == str(file)
    answer = planned(*arguments, "--max-model-len", "200")
    assert (answer["max_model_len"], answer["max_model_len_source"]) == (200, "flag --max-model-len")


def test_the_demo_model_is_planned_without_a_name(demo_gguf, planned):
    answer = planned("--memory", "1GiB")
    assert answer == planned(demo_gguf, "--memory", "1GiB") | {"model": None}
    assert (answer["max_position"], answer["bytes_per_token"]) == (8192, 30 * 2 * 3 * 64 * 4)


# -- quantised --------------------------------------------------------------------------------------------------


def lines_with(text, *words):
    return [line.strip() for line in text.splitlines() if any(word in line for word in words)]


def test_a_quantised_cache_is_compared_with_the_models_own_dtype(config_file, capsys):
    file = config_file()
    arguments = ["--device", "cuda", "--memory", "1GiB", "--max-model-len", "4096", "--kv-cache-dtype", "fp8_e4m3"]
    assert run(["plan", file, *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{file} on cuda in float16, KV cache in fp8_e4m3_per_token_head, model class llama ")
    # A page is 2 * 16 * 8 vectors of 128 bytes, with 4 of scale each; a block is 32 of them.
    assert lines_with(shown, "blocks   ", "scale", "bytes a page", "instead of") == [
        "blocks           992 of 1.03 MiB (1081344 bytes), one of them the null block",
        "scales           one for each token and head, kept in the page, by default; 'auto': whether the checkpoint "
        "has some is not known without its weights, and none are assumed",
        "bytes a page       33.00 KiB (33792 bytes), for a block of 16 tokens in one layer",
        "of that, scales    1.00 KiB (1024 bytes): a float32 for each vector of a token and head",
        "with kv_cache_dtype fp8_e4m3: 3.87x instead of 1.99x in float16, 1.93 times as many, at 264.00 MiB a request "
        "instead of 512.00 MiB",
    ]


def test_a_program_gets_the_comparison(config_file, planned):
    arguments = [config_file(), "--device", "cuda", "--memory", "1GiB", "--max-model-len", "4096"]
    answer = planned(*arguments, "--kv-cache-dtype", "int8", "--kv-cache-scales", "per_tensor")
    assert answer["kv_cache_dtype"] == "int8"
    assert answer["kv_cache_scales"] == (
        "per_tensor, from the checkpoint, whose weights are not here, by flag --kv-cache-scales"
    )
    assert (answer["num_blocks"], answer["groups"][0]["scale_bytes"]) == (1024, 0)
    assert answer["unquantised"] == {
        "kv_cache_dtype": "float16",
        "num_blocks": 512,
        "bytes_per_block": 2**21,
        "longest_request": 511 * 16,
        "blocks_per_request": 256,
        "bytes_per_request": 2**29,
        "max_concurrency": 511 / 256,
        "factor": 1023 / 511,
    }
    answer = planned(*arguments, "--kv-cache-dtype", "int8", "--kv-cache-scales", "per_token_head")
    assert (answer["num_blocks"], answer["groups"][0]["scale_bytes"]) == (992, 1024)
    assert answer["groups"][0]["spec"]["dtype"] == "int8_per_token_head"


def test_where_nothing_would_fit_unquantised_there_is_no_factor(tiny_folder, planned, capsys):
    # The null block alone, of 8192 bytes, in float32.
    arguments = [tiny_folder, "--memory", 3 * BYTES_PER_BLOCK // 2, "--kv-cache-dtype", "int8"]
    answer = planned(*arguments)
    assert (answer["unquantised"]["num_blocks"], answer["unquantised"]["factor"]) == (1, None)
    assert run(["plan", *map(str, arguments)]) == 0
    (line,) = lines_with(capsys.readouterr().out, "with kv_cache_dtype")
    assert line.startswith("with kv_cache_dtype int8: 1.00x instead of 0.00x in float32, at ")


def test_windows_count_in_the_comparison(tmp_path, planned):
    gemma = {"model_type": "gemma3_text", "vocab_size": 1000, "hidden_size": 640, "intermediate_size": 2048}
    gemma |= {"num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
    gemma |= {"sliding_window": 512, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}
    file = tmp_path / "gemma.json"
    file.write_text(json.dumps(gemma))
    arguments = [file, "--device", "cuda", "--memory", "1GiB", "--max-model-len", "8192"]
    for switch in ([], ["--disable-hybrid-kv-cache-manager"]):
        plain = planned(*arguments, *switch)
        answer = planned(*arguments, *switch, "--kv-cache-dtype", "fp8_e4m3", "--kv-cache-scales", "per_head")
        keys = ("num_blocks", "bytes_per_block", "longest_request", "blocks_per_request", "max_concurrency")
        assert {key: answer["unquantised"][key] for key in keys} == {key: plain[key] for key in keys}
        assert answer["num_blocks"] == 2**30 // (plain["bytes_per_block"] // 2)
        assert answer["unquantised"]["factor"] == answer["max_concurrency"] / plain["max_concurrency"]


def test_scales_in_the_weights_beside_a_config_count(tiny_folder, tmp_path, planned):
    folder = tmp_path / "scaled"
    shutil.copytree(tiny_folder, folder)
    add_kv_scales(folder, [LayerScales((0.5,), (0.5,))] * 2)
    arguments = ["--memory", "1MiB", "--dtype", "float32", "--kv-cache-dtype", "fp8_e4m3"]
    answer = planned(folder, *arguments)
    assert answer["kv_cache_dtype"] == "fp8_e4m3"
    assert answer["kv_cache_scales"] == "one for keys and one for values of each layer, from the checkpoint, by default"
    assert planned(tiny_folder, *arguments)["kv_cache_scales"] == (
        "one for each token and head, kept in the page, by default; 'auto': the checkpoint has none"
    )


# -- as an engine does it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_memory_bytes": 5 * BYTES_PER_BLOCK + 1},
        {"max_model_len": 100, "block_size": 5},
        {"kv_cache_dtype": "bfloat16", "block_size": 32},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "fp8_e4m3", "kv_cache_scales": "per_tensor"},
        {"kv_cache_dtype": "int8", "kv_cache_scales": "per_token_head", "block_size": 5},
        {"dtype": "bfloat16", "model_impl": "transformers"},
        {"kv_cache_memory_bytes": None, "num_kv_blocks": 9, "max_model_len": 300},
    ],
    ids=str,
)
def test_the_numbers_are_those_of_an_engine_with_the_same_settings(tiny_folder, planned, settings):
    settings = {"kv_cache_memory_bytes": 40 * BYTES_PER_BLOCK} | settings
    settings = {name: value for name, value in settings.items() if value is not None}
    flags = [text for name, value in settings.items() for text in ("--" + name.replace("_", "-"), value)]
    answer = planned(tiny_folder, *flags)
    assembly = build_engine(EngineConfig.from_flat(model=str(tiny_folder), **settings))
    layout = assembly.kv_cache_config
    assert answer["num_blocks"] == layout.num_blocks
    assert answer["num_usable_blocks"] == assembly.engine.stats().free_blocks
    assert (answer["bytes_per_block"], answer["total_bytes"]) == (layout.bytes_per_block, layout.total_bytes)
    assert answer["max_model_len"] == assembly.engine.max_model_len
    assert [(group["kind"], tuple(group["layers"])) for group in answer["groups"]] == [
        (group.spec.kind, group.layers) for group in layout.groups
    ]


# -- of what size -----------------------------------------------------------------------------------------------


def test_the_size_is_the_one_that_the_settings_give(tiny_folder, tmp_path, planned):
    file = tmp_path / "octavo.toml"
    file.write_text("[cache]\nkv_cache_memory_bytes = 100000\n")
    answer = planned(tiny_folder, "--config", file)
    assert (answer["num_blocks"], answer["memory_source"]) == (12, f"kv_cache_memory_bytes by {file}")
    # A flag takes the place of what the file says in another way.
    answer = planned(tiny_folder, "--config", file, "--num-kv-blocks", "20")
    assert (answer["num_blocks"], answer["memory_bytes"]) == (20, 20 * BYTES_PER_BLOCK)
    answer = planned(tiny_folder, "--config", file, "--memory", "64KiB")
    assert (answer["num_blocks"], answer["memory_source"]) == (8, "given by --memory")


def test_without_a_size_it_is_what_an_engine_would_take_here(tiny_folder, planned, monkeypatch):
    monkeypatch.setattr("octavo.core.memory.cpu_free_bytes", lambda: 1000 * BYTES_PER_BLOCK)
    answer = planned(tiny_folder)
    assert (answer["num_blocks"], answer["memory_source"]) == (
        250,
        "0.25 of what is free here now; an engine takes it with the weights loaded",
    )
    assert planned(tiny_folder, "--cpu-memory-share", "0.5")["num_blocks"] == 500


@pytest.mark.parametrize("flag", ["--num-kv-blocks", "--kv-cache-memory-bytes"])
def test_two_sizes_at_once_are_refused(tiny_folder, refused, flag):
    assert refused(tiny_folder, "--memory", "1GiB", flag, "100") == (
        f"The size of the KV cache is given twice, by --memory and by flag {flag}; leave one out."
    )


def test_two_sizes_of_the_settings_are_refused_as_by_an_engine(tiny_folder, refused):
    assert refused(tiny_folder, "--num-kv-blocks", "9", "--kv-cache-memory-bytes", "100000") == (
        "The size of the KV cache is given twice, by num_kv_blocks and by kv_cache_memory_bytes; leave one out."
    )


def test_what_is_too_little_or_no_size_is_refused(tiny_folder, refused):
    assert refused(tiny_folder, "--memory", "16383") == (
        "A request of 2 tokens takes 1 block of 8192 bytes (8.00 KiB) beside the null block, and there is room for 1 "
        "in 16383 bytes (16.00 KiB), the null block included. Give the KV cache 16384 bytes (16.00 KiB) or more, or "
        "lower block_size."
    )
    assert refused(tiny_folder, "--memory", "1", "--block-size", "1") == (
        "A request of 2 tokens takes 2 blocks of 512 bytes beside the null block, and there is room for 0 in 1 byte, "
        "the null block included. Give the KV cache 1536 bytes (1.50 KiB) or more, or lower block_size."
    )
    assert refused(tiny_folder, "--memory", "8P").startswith("--memory is '8P'; it must be a number above 0")
    assert refused(tiny_folder, "--memory", "8Gb") == (
        "--memory is '8Gb', and Gb is how bits are written; for bytes write 8GB."
    )
    assert refused(tiny_folder, "--memory", "1MiB", "--max-model-len", "513").startswith("max_model_len is 513; it ")
    assert refused(tiny_folder, "--memory", "9999999999TiB") == (
        f"The KV cache would have {9999999999 * 1024**4} bytes, which is more than any machine has. Give a smaller "
        "size."
    )


# -- for another machine ----------------------------------------------------------------------------------------


def test_a_gpu_that_is_not_here_decides_about_the_dtype(config_file, planned):
    answer = planned(config_file(), "--memory", "8GiB", "--device", "cuda")
    assert (answer["device"], answer["dtype"], answer["kv_cache_dtype"]) == ("cuda", "float16", "float16")
    assert answer["bytes_per_token"] == 131072
    answer = planned(config_file(), "--memory", "8GiB", "--device", "cuda:1", "--dtype", "bfloat16")
    assert (answer["device"], answer["dtype"]) == ("cuda:1", "bfloat16")
    assert planned(config_file(), "--memory", "8GiB", "--device", "cpu")["bytes_per_token"] == 262144


def test_how_much_a_gpu_gives_has_to_be_said(config_file, refused):
    assert refused(config_file(), "--device", "cuda") == (
        "How much memory the KV cache gets on cuda is measured when an engine starts, with the weights loaded. Say "
        "what to plan with, such as --memory 8GiB."
    )


@pytest.mark.parametrize("device", ["mps", "cpu:0"])
def test_a_device_that_octavo_does_not_run_on_is_refused(config_file, refused, device):
    assert refused(config_file(), "--memory", "8GiB", "--device", device) == (
        f"device is {device!r}; Octavo runs on 'cpu' and on 'cuda' devices."
    )


# -- of what model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_config_is_enough_for_the_families_with_a_class_of_their_own(config_file, planned, model_type):
    answer = planned(config_file(model_type=model_type), "--memory", "1GiB", "--device", "cuda")
    assert (answer["model_class"], answer["bytes_per_token"]) == (model_type, 131072)


def test_a_config_is_enough_for_a_family_that_runs_through_transformers(tmp_path, planned):
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": 500}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = planned(tmp_path, "--memory", "1MiB")
    assert (answer["model_class"], answer["max_position"]) == ("transformers", 256)
    assert answer["bytes_per_token"] == 3 * 2 * 64 * 4


def window_lines(capsys):
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith(("  window", "  chunk"))]


def test_a_request_holds_no_more_than_a_window_and_a_steps_tokens(config_file, planned):
    file = config_file(model_type="mistral", sliding_window=128)
    (group,) = planned(file, "--memory", "1GiB", "--max-num-batched-tokens", "512")["groups"]
    assert (group["kind"], group["manager"]) == ("sliding_window", "sliding_window")
    assert (group["spec"]["class"], group["spec"]["window"]) == ("SlidingWindowSpec", 128)
    assert group["windows"] == [128] * 32
    # 8 blocks of 16 reach the 127 tokens before a query; a step's 512 tokens touch 33.
    assert group["blocks_per_request"] == 8 + 33


def test_where_all_layers_have_a_window_nothing_stays_until_the_request_ends(config_file, planned, capsys):
    arguments = [config_file(model_type="mistral", sliding_window=128), "--memory", "1GiB", "--device", "cuda"]
    assert planned(*arguments)["lasting_bytes_per_token"] == 0
    assert (
        "bytes a token    128.00 KiB (131072 bytes) while all layers keep it, 0 bytes until its request ends"
    ) in lines_of(capsys, *arguments)


def test_layers_with_a_window_and_layers_without_have_groups_of_their_own(config_file, planned):
    file = config_file(model_type="qwen2", use_sliding_window=True, sliding_window=128, max_window_layers=16)
    groups = planned(file, "--memory", "1GiB")["groups"]
    assert [(group["kind"], group["layers"]) for group in groups] == [
        ("full_attention", list(range(16))),
        ("sliding_window", list(range(16, 32))),
    ]


def test_a_window_whose_tokens_are_all_kept_is_said(config_file, planned, capsys):
    arguments = ["--memory", "1GiB", "--disable-hybrid-kv-cache-manager"]
    file = config_file(model_type="mistral", sliding_window=128)
    assert planned(file, *arguments)["bytes_per_token"] == planned(file, "--memory", "1GiB")["bytes_per_token"]
    assert run(["plan", file, *arguments]) == 0
    assert window_lines(capsys) == ["  window             128 tokens in layers 0-31; all tokens are kept nevertheless"]
    file = config_file(model_type="qwen2", use_sliding_window=True, sliding_window=128, max_window_layers=30)
    assert run(["plan", file, *arguments]) == 0
    assert window_lines(capsys) == ["  window             128 tokens in layers 30-31; all tokens are kept nevertheless"]
    assert run(["plan", file, "--memory", "1GiB"]) == 0
    assert window_lines(capsys) == []


def test_a_folder_and_its_config_alone_give_the_same(tiny_folder, tmp_path, planned):
    shutil.copy(tiny_folder / "config.json", tmp_path)
    of_folder = planned(tiny_folder, "--memory", "1MiB")
    for model in (tmp_path, tmp_path / "config.json"):
        assert planned(model, "--memory", "1MiB") == of_folder | {"model": str(model)}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model_type": None},
            "The config of '{file}' has no model_type, by which a model class is chosen. If it is a model's config, "
            "name the class in model_impl.",
        ),
        (
            {"num_hidden_layers": None},
            "In '{file}': The config lacks 'num_hidden_layers', which every model of its kind needs.",
        ),
        (
            {"num_key_value_heads": 0},
            "In '{file}': The config gives 0 as num_key_value_heads; it has to be positive.",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "two"}},
            "In '{file}': The config gives 'two' as factor of the rope type 'linear'; it has to be a number.",
        ),
        (
            {"quantization_config": {"bits": 4}},
            "In '{file}': The config sets quantization_config to {{'bits': 4}}, which changes what the model "
            "computes and is not supported. Use a copy of the model that is not quantised, or a GGUF file.",
        ),
        (
            {"torch_dtype": None},
            "{file} gives no dtype, and there are no weights beside it that would tell. Set dtype, such as "
            "dtype='bfloat16'.",
        ),
        (
            {"model_type": "nobodys"},
            "In '{file}': model_type 'nobodys' is known neither to Octavo nor to transformers",
        ),
        (
            {"model_type": "qwen3_next"},
            "In '{file}': model_type 'qwen3_next' keeps a recurrent state, which each token changes as a whole (as "
            "every qwen3_next does), and Octavo has no KV-cache manager for the kind 'mamba'. It has managers for full",
        ),
        (
            {"model_type": "falcon"},
            "In '{file}': model_type 'falcon' computes its attention itself, or takes it from a list of",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_do_is_refused_with_what_is_missing(config_file, refused, changes, sentence):
    file = config_file(**changes)
    assert refused(file, "--memory", "8GiB", "--device", "cuda").startswith(sentence.format(file=file))


def test_a_model_that_is_named_twice_is_refused(tiny_folder, refused):
    assert refused(tiny_folder, "--model", "other") == f"The model is named twice: '{tiny_folder}' and 'other'."


# -- somebody else's parts --------------------------------------------------------------------------------------


@pytest.fixture
def sink_window(site):
    """The example package, put where an installer would put it; returns its example config."""
    package = Path(__file__).parents[2] / "examples" / "octavo-sink-window"
    shutil.copytree(package / "src" / "octavo_sink_window", site / "octavo_sink_window")
    groups = tomllib.loads((package / "pyproject.toml").read_text())["project"]["entry-points"]
    entries = "".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in members.items())
        for group, members in groups.items()
    )
    install(site, "octavo-sink-window", entries)
    from octavo_sink_window.checkpoint import TINY_CONFIG

    return TINY_CONFIG


def test_a_third_partys_manager_says_what_a_request_takes(sink_window, tmp_path, planned, capsys):
    (tmp_path / "config.json").write_text(json.dumps(sink_window))
    arguments = [tmp_path, "--model-impl", "sink_window", "--block-size", "4", "--num-kv-blocks", "41"]
    arguments += ["--max-num-batched-tokens", "16"]
    answer = planned(*arguments)
    (group,) = answer["groups"]
    # 2 blocks of the first 8 tokens, 2 of the window, 5 of a step's 16 tokens: no more, however long the request is.
    assert (group["kind"], group["manager"], group["blocks_per_request"]) == ("sink_window", "sink_window", 9)
    assert group["spec"] == {
        "class": "SinkWindowSpec",
        "block_size": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "dtype": "float32",
        "keep_first": 8,
        "window": 9,
    }
    assert answer["max_model_len"] == 512
    assert [(row["num_tokens"], row["num_requests"]) for row in answer["concurrency"]] == [(512, 4)]
    # In its place a manager that drops nothing.
    answer = planned(*arguments, "--kv-managers", "sink_window=full_attention")
    assert answer["max_model_len"] == 160
    assert run(["plan", *map(str, arguments)]) == 0
    shown = capsys.readouterr().out
    assert "  KV-cache manager   sink_window (octavo-sink-window 1.0), by default; " in shown
    # Its layers see a window, and keep no more than that.
    assert "all tokens are kept" not in shown
    # The spec says what its layers keep without that.
    assert "\n  with disable_hybrid_kv_cache_manager: " in shown
    (group,) = planned(*arguments, "--disable-hybrid-kv-cache-manager")["groups"]
    assert (group["kind"], group["spec"]["class"], group["is_bounded"]) == (
        "full_attention",
        "FullAttentionSpec",
        False,
    )


def test_what_a_package_prints_is_not_part_of_the_answer(tiny_folder, site, planned, capsys):
    source = (
        "from octavo.kv_managers.full_attention import FullAttentionManager\nprint('imported')\n"
        "class Manager(FullAttentionManager):\n    contract_version = 1\n    @classmethod\n"
        "    def max_blocks_per_request(cls, spec, max_model_len, max_tokens_in_flight):\n"
        "        print('asked')\n        return super().max_blocks_per_request(spec, max_model_len, 1)\n"
    )
    install(site, "loud-package", "[octavo.kv_managers]\nloud = loud_module:Manager\n", loud_module=source)
    arguments = ["--memory", "1MiB", "--kv-managers", "full_attention=loud"]
    assert planned(tiny_folder, *arguments)["groups"][0]["manager"] == "loud"
    assert run(["plan", str(tiny_folder), *arguments]) == 0
    shown = capsys.readouterr()
    assert "asked" in shown.err
    assert "asked" not in shown.out


def test_a_manager_for_what_no_layer_keeps_is_refused(tiny_folder, refused):
    assert refused(tiny_folder, "--memory", "1MiB", "--kv-managers", "mamba=full_attention") == (
        "kv_managers chooses 'full_attention' for the kind 'mamba', and the model's layers keep: full_attention."
    )


# -- several KV-cache groups ------------------------------------------------------------------------------------


# Gemma 3 with 270 million parameters: 15 layers with a window of 512, and every sixth one without.
GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
GEMMA_ARGUMENTS = ["--memory", "1GiB", "--device", "cuda", "--max-model-len", "8192", "--max-num-batched-tokens", "512"]
WINDOW_LAYERS = [layer for layer in range(18) if layer % 6 != 5]


@pytest.fixture
def gemma(tmp_path):
    """Writes Gemma's config, with some values changed, and returns the file."""

    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(GEMMA | changes))
        return str(path)

    return write


def lines_of(capsys, *arguments):
    assert run(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_groups_of_one_spec_are_told_once(gemma, capsys):
    lines = lines_of(capsys, gemma(), *GEMMA_ARGUMENTS)
    # 512 blocks of the full layers; of each window group 32 before a query and 33 that a step of 512 tokens touches.
    assert lines[2:19] == [
        "memory           1.00 GiB (1073741824 bytes), given by --memory",
        "blocks           21845 of 48.00 KiB (49152 bytes), one of them the null block",
        "bytes a token    18.00 KiB (18432 bytes) while all layers keep it, 3.00 KiB (3072 bytes) until its request "
        "ends",
        "longest request  32768 tokens, as long as the model's positions go",
        "max_model_len    8192 tokens, by flag --max-model-len",
        "a request        of 8192 tokens holds at most 837 blocks, 39.23 MiB (41140224 bytes), in 6 groups",
        "",
        "sliding_window (layers 0-4, 6-10, 12-16), each keeps SlidingWindowSpec(block_size=16, num_kv_heads=1, "
        "head_dim=256, dtype='bfloat16', window=512)",
        "  KV-cache groups    5 of 3 layers each",
        f"  KV-cache manager   sliding_window ({OWN}), by default; named as what the layers keep",
        "  bytes a token      15.00 KiB (15360 bytes) in layers 0-4, 6-10, 12-16, while it is kept",
        "  bytes a page       16.00 KiB (16384 bytes), for a block of 16 tokens in one layer",
        "  a request          of 8192 tokens holds at most 65 blocks in each group, 325 together, 15.23 MiB (15974400 "
        "bytes)",
        "",
        "full_attention (layers 5, 11, 17), each keeps FullAttentionSpec(block_size=16, num_kv_heads=1, head_dim=256, "
        "dtype='bfloat16')",
        f"  KV-cache manager   full_attention ({OWN}), by default; named as what the layers keep",
        "  bytes a token      3.00 KiB (3072 bytes) in layers 5, 11, 17",
    ]
    first = lines.index("where the memory goes") + 1
    assert [line.split("  ")[1] for line in lines[first : first + 3]] == [
        "a request of 8192 tokens, sliding_window",
        "a request of 8192 tokens, full_attention",
        "further requests",
    ]


def test_a_program_is_told_groups_of_one_spec_once(gemma, planned):
    answer = planned(gemma(), *GEMMA_ARGUMENTS)
    windows, full = answer["groups"]
    assert (windows["num_groups"], windows["layers"], windows["layers_by_group"]) == (
        5,
        WINDOW_LAYERS,
        [[first, first + 6, first + 12] for first in range(5)],
    )
    assert (windows["blocks_per_request"], windows["is_bounded"], windows["windows"]) == (5 * 65, True, [512] * 15)
    assert (full["num_groups"], full["blocks_per_request"], full["is_bounded"]) == (1, 512, False)
    assert (answer["bytes_per_token"], answer["lasting_bytes_per_token"]) == (18432, 3072)
    assert (answer["blocks_per_request"], answer["bytes_per_request"]) == (837, 837 * 49152)


def test_what_the_switch_would_cost_is_said_and_what_it_costs_where_it_is_set(gemma, planned, capsys):
    file = gemma()
    # The window layers too hold 512 blocks then, six times as large as now.
    switched = {
        "num_blocks": 3640,
        "bytes_per_block": 6 * 49152,
        "longest_request": 32768,
        "blocks_per_request": 512,
        "bytes_per_request": 6 * 512 * 49152,
        "max_concurrency": 3639 / 512,
    }
    assert planned(file, *GEMMA_ARGUMENTS)["switched"] == switched
    assert lines_of(capsys, file, *GEMMA_ARGUMENTS)[-2:] == [
        "  maximum concurrency for 8192 tokens a request: 26.09x",
        "  with disable_hybrid_kv_cache_manager: 7.10x instead of 26.09x, at 144.00 MiB a request instead of 39.23 MiB",
    ]
    arguments = [*GEMMA_ARGUMENTS, "--disable-hybrid-kv-cache-manager"]
    answer = planned(file, *arguments)
    assert answer["disable_hybrid_kv_cache_manager"] is True
    assert {key: answer[key] for key in switched} == switched
    assert (answer["switched"]["blocks_per_request"], answer["switched"]["num_blocks"]) == (837, 21845)
    assert lines_of(capsys, file, *arguments)[-2:] == [
        "  maximum concurrency for 8192 tokens a request: 7.10x",
        "  without disable_hybrid_kv_cache_manager, which is set by flag --disable-hybrid-kv-cache-manager: 26.09x "
        "instead of 7.10x, at 39.23 MiB a request instead of 144.00 MiB",
    ]


def test_the_switch_is_left_out_where_it_changes_nothing(config_file, planned, capsys):
    arguments = ["--memory", "1GiB", "--disable-hybrid-kv-cache-manager"]
    assert planned(config_file(), *arguments)["switched"] is None
    assert not [line for line in lines_of(capsys, config_file(), *arguments) if "disable_hybrid" in line]


def test_the_switch_is_left_out_where_two_decimals_show_no_difference(config_file, planned, capsys):
    # A request is shorter than the window: its 16 blocks are as many, and as large, with and without.
    arguments = [config_file(model_type="mistral", sliding_window=512), "--memory", "1GiB", "--max-model-len", "256"]
    answer = planned(*arguments)
    assert answer["switched"]["max_concurrency"] == answer["max_concurrency"] == 255 / 16
    lines = lines_of(capsys, *arguments)
    assert lines[-1] == "  maximum concurrency for 256 tokens a request: 15.93x"
    # A request longer than the window and a step's tokens together shows one.
    arguments = [*arguments[:-1], "4096"]
    assert lines_of(capsys, *arguments)[-1] == (
        "  with disable_hybrid_kv_cache_manager: 0.99x instead of 1.58x, at 1.00 GiB a request instead of 644.00 MiB"
    )


def test_a_manager_that_is_named_for_windows_is_no_obstacle_to_the_comparison(gemma, planned):
    arguments = [*GEMMA_ARGUMENTS, "--kv-managers", "sliding_window=full_attention"]
    answer = planned(gemma(), *arguments)
    windows = answer["groups"][0]
    assert (windows["manager"], windows["is_bounded"]) == ("full_attention", False)
    assert (answer["blocks_per_request"], answer["switched"]["blocks_per_request"]) == (6 * 512, 512)


def test_a_window_that_its_manager_keeps_whole_is_said(gemma, capsys):
    arguments = [*GEMMA_ARGUMENTS, "--kv-managers", "sliding_window=full_attention"]
    assert run(["plan", gemma(), *arguments]) == 0
    assert window_lines(capsys) == [
        "  window             512 tokens in layers 0-4, 6-10, 12-16; all tokens are kept nevertheless"
    ]


def test_idle_slots_are_said_with_their_share(gemma, planned, capsys):
    # 22 window layers and 4 without: six groups, two of them with three layers for four slots.
    file = gemma(num_hidden_layers=26)
    answer = planned(file, *GEMMA_ARGUMENTS)
    assert answer["groups"][0]["unused_bytes_per_block"] == [0, 0, 0, 0, 16384, 16384]
    # 512 blocks of the full layers, 6 x 65 of the windows, of which 2 x 65 lack a page of four.
    assert answer["idle_share"] == pytest.approx(130 / 4 / 902)
    lines = lines_of(capsys, file, *GEMMA_ARGUMENTS)
    assert "padding          3.6% of that lies idle" in lines
    assert [line for line in lines if line.startswith(("  unused", "  KV-cache groups"))] == [
        "  KV-cache groups    6 of 3 or 4 layers each",
        "  unused in a block  16.00 KiB (16384 bytes), 25.0% in 2 of the groups: 1 of 4 slots for a layer is idle",
    ]


def changed_specs(monkeypatch, change):
    """Let Gemma's layers keep something else than they do; `change` gets a layer's spec."""
    from octavo.models.gemma import GemmaModel

    honest = GemmaModel.spec_from_config

    def spec_from_config(config, **settings):
        spec = honest(config, **settings)
        return dataclasses.replace(spec, kv_cache_specs=tuple(map(change, spec.kv_cache_specs)))

    monkeypatch.setattr(GemmaModel, "spec_from_config", spec_from_config)


def test_larger_blocks_are_said_and_where_hits_end_then(gemma, planned, capsys, monkeypatch):
    def three_heads_in_windows(spec):
        return dataclasses.replace(spec, num_kv_heads=3) if hasattr(spec, "window") else spec

    changed_specs(monkeypatch, three_heads_in_windows)
    answer = planned(gemma(), *GEMMA_ARGUMENTS)
    assert answer["hit_alignment"] == 48
    assert [(group["spec"]["block_size"], group["stated_block_size"]) for group in answer["groups"]] == [
        (16, 16),
        (48, 16),
    ]
    lines = lines_of(capsys, gemma(), *GEMMA_ARGUMENTS)
    assert "prefix hits      end at multiples of 48 tokens, whole blocks of every group" in lines
    assert [line for line in lines if line.startswith("  tokens a block")] == [
        "  tokens a block     48 instead of 16: so its page is as large as the others'"
    ]
    assert not [line for line in lines if line.startswith(("  unused", "padding"))]


def test_shorter_pages_are_said_with_their_share(gemma, capsys, monkeypatch):
    def smaller_heads_without_a_window(spec):
        return spec if hasattr(spec, "window") else dataclasses.replace(spec, head_dim=192)

    changed_specs(monkeypatch, smaller_heads_without_a_window)
    lines = lines_of(capsys, gemma(), *GEMMA_ARGUMENTS)
    # 512 of 837 blocks, a quarter of each.
    assert "padding          15.3% of that lies idle" in lines
    assert [line for line in lines if line.startswith("  unused")] == [
        "  unused in a block  12.00 KiB (12288 bytes), 25.0%: its pages are 4096 bytes shorter than the largest"
    ]


def test_all_groups_share_the_blocks(tiny_folder, planned, monkeypatch):
    def one_group_a_layer(specs):
        return tuple(KVCacheGroup(spec, (layer,)) for layer, spec in enumerate(specs))

    monkeypatch.setattr("octavo.selection.select.make_groups", one_group_a_layer)
    answer = planned(tiny_folder, "--memory", "1MiB")
    # A block is a page now, and a request holds blocks in both groups.
    assert (answer["num_blocks"], answer["bytes_per_block"], answer["bytes_per_token"]) == (256, PAGE_BYTES, 512)
    (group,) = answer["groups"]
    assert (group["layers_by_group"], group["bytes_per_token"], group["blocks_per_request"]) == ([[0], [1]], 512, 64)
    assert [row["blocks_per_request"] for row in answer["concurrency"]] == [64]


# -- without weights and without torch --------------------------------------------------------------------------


def test_no_weight_is_looked_at(tiny_folder, tmp_path, planned):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert planned(folder, "--memory", "1MiB")["num_blocks"] == 128


def test_its_help_imports_no_torch():
    code = "import sys\nfrom octavo.cli.app import run\nrun(['plan', '--help'])\nassert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--memory SIZE" in result.stdout
