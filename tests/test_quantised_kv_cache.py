"""Quantised KV caches in whole engines: what they cost in accuracy, and that nothing else depends on them."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import EngineConfig, SamplingParams
from octavo.assembly import build_engine
from octavo.core.engine_core import EngineCore
from octavo.core.interfaces.kv_format import KV_FORMATS
from octavo.core.interfaces.kv_scales import LayerScales
from octavo.errors import CheckpointError, ConfigError
from octavo.plugins.registry import scan
from octavo.selection.managers import request_cost
from octavo.selection.select import model_needs, select
from octavo.testing import tiny_models
from octavo.testing.engines import Finished, assert_nothing_leaks, run_to_end
from octavo.testing.quantised_kv import TEXT, Bench, BenchRunner, Difference, by_head, by_tensor, difference

DTYPES = ("fp8_e4m3", "int8")
GRANULARITIES = ("per_tensor", "per_head", "per_token_head")
LARGEST_OF = {"per_tensor": by_tensor, "per_head": by_head}
NUM_TOKENS = 192
TOKEN_IDS = random.Random(0).choices(range(3, 512), k=NUM_TOKENS)
MODELS: dict[str, Callable[..., Path]] = {
    "llama": tiny_models.tiny_llama,
    # Windows in six layers of seven.
    "gemma3": tiny_models.tiny_gemma3,
    # Soft caps.
    "gemma2": tiny_models.tiny_gemma2,
    # Latents, which are keys and values at once.
    "deepseek_v3": tiny_models.tiny_deepseek_v3,
    # Sinks.
    "gpt_oss": tiny_models.tiny_gpt_oss,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models, by name, whose checkpoints have no scales."""
    return {name: make(tmp_path_factory.mktemp(name), seed=4) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def benches(folders: dict[str, Path]) -> Callable[..., Bench]:
    """Loads each of them once in a dtype."""
    made: dict[tuple[str, str], Bench] = {}

    def bench(name: str, dtype: str = "float32") -> Bench:
        if (name, dtype) not in made:
            made[name, dtype] = Bench(EngineConfig.from_flat(model=str(folders[name]), dtype=dtype))
        return made[name, dtype]

    return bench


@pytest.fixture(scope="module")
def exact(benches: Callable[..., Bench]) -> Callable[..., tuple[BenchRunner, torch.Tensor]]:
    """Returns the runner with an unquantised KV cache, filled with TOKEN_IDS, and the logits after each."""
    made: dict[tuple[str, str], tuple[BenchRunner, torch.Tensor]] = {}

    def run(name: str, dtype: str = "float32") -> tuple[BenchRunner, torch.Tensor]:
        if (name, dtype) not in made:
            runner = benches(name, dtype).runner(dtype)
            made[name, dtype] = runner, runner.logits(TOKEN_IDS)
        return made[name, dtype]

    return run


def say_what_scales_are_for(folder: Path, kv_dtype: str) -> None:
    """Make a folder's config say for which codes its scales are. Without a word they are for fp8_e4m3."""
    scheme = {"type": "int" if kv_dtype == "int8" else "float", "num_bits": 8}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def scaled(
    folders: dict[str, Path],
    exact: Callable[..., tuple[BenchRunner, torch.Tensor]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str, str], Path]:
    """Returns a folder of a model with scales in its checkpoint, which were calibrated for a format."""
    made: dict[tuple[str, str, str], Path] = {}

    def make(name: str, kv_dtype: str, granularity: str) -> Path:
        key = (name, kv_dtype, granularity)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("scaled") / name
            shutil.copytree(folders[name], made[key])
            scales = exact(name)[0].scales(kv_dtype, LARGEST_OF[granularity], NUM_TOKENS)
            tiny_models.add_kv_scales(made[key], scales)
            say_what_scales_are_for(made[key], kv_dtype)
        return made[key]

    return make


@pytest.fixture
def make_engine() -> Iterator[Callable[..., EngineCore]]:
    """Makes engines; in the end nothing may leak."""
    engines: list[EngineCore] = []

    def make(folder: Path, **settings: Any) -> EngineCore:
        config = EngineConfig.from_flat(**{"model": str(folder), "num_kv_blocks": 400} | settings)
        engines.append(build_engine(config).engine)
        return engines[-1]

    yield make
    for engine in engines:
        assert_nothing_leaks(engine)
        engine.shutdown()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was warned of, but for the tokenizers that tiny models lack."""
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in messages if "token ids only" not in message]


# -- errors -----------------------------------------------------------------------------------------------------

# Mean |difference| of a logit from the unquantised run's, in float32, as it was measured (torch 2.13.0, one core of an
# AMD EPYC) for per_tensor, per_head and per_token_head.
MEAN_ERRORS = {
    ("llama", "fp8_e4m3"): (0.0955, 0.0984, 0.0802),
    ("llama", "int8"): (0.0279, 0.0280, 0.0155),
    ("gemma3", "fp8_e4m3"): (0.1573, 0.1620, 0.1427),
    ("gemma3", "int8"): (0.0511, 0.0530, 0.0314),
    ("gemma2", "fp8_e4m3"): (0.0291, 0.0304, 0.0258),
    ("gemma2", "int8"): (0.0106, 0.0106, 0.0059),
    ("deepseek_v3", "fp8_e4m3"): (0.0845, 0.0845, 0.0788),
    ("deepseek_v3", "int8"): (0.0319, 0.0319, 0.0185),
    ("gpt_oss", "fp8_e4m3"): (0.0702, 0.0676, 0.0513),
    ("gpt_oss", "int8"): (0.0239, 0.0203, 0.0098),
}
# Of the best next token, the least share that stays the same: 0.87 and 0.93 were measured, on models whose best two
# tokens are nearer to each other than a trained model's.
LEAST_AGREEMENT = {"fp8_e4m3": 0.82, "int8": 0.89}


def quantised(bench: Bench, exact: BenchRunner, kv_dtype: str, granularity: str) -> BenchRunner:
    """Return the model with a KV cache in a format, and scales that suit it."""
    if granularity == "per_token_head":
        return bench.runner(f"{kv_dtype}_per_token_head")
    return bench.runner(kv_dtype, exact.scales(kv_dtype, LARGEST_OF[granularity], NUM_TOKENS))


@pytest.mark.parametrize(("name", "kv_dtype"), MEAN_ERRORS)
def test_the_error_of_each_format_is_what_was_measured(name, kv_dtype, benches, exact):
    runner, reference = exact(name)
    for granularity, measured in zip(GRANULARITIES, MEAN_ERRORS[name, kv_dtype], strict=True):
        logits = quantised(benches(name), runner, kv_dtype, granularity).logits(TOKEN_IDS)
        found = difference(logits, reference, TOKEN_IDS)
        # From below too: an error that is not there would mean that nothing was quantised.
        assert measured / 1.5 < found.mean < measured * 1.5, (granularity, found)
        assert found.agreement > LEAST_AGREEMENT[kv_dtype], (granularity, found)
        assert found.divergence < 0.06, (granularity, found)


@pytest.mark.parametrize("name", MODELS)
def test_an_unquantised_run_differs_from_itself_by_nothing(name, benches, exact):
    _, reference = exact(name)
    again = difference(benches(name).runner("float32").logits(TOKEN_IDS), reference, TOKEN_IDS)
    assert (again.largest, again.mean, again.agreement) == (0, 0, 1)
    assert again.perplexity == again.reference_perplexity


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_in_half_precision_the_error_is_hardly_larger(name, dtype, benches, exact):
    runner, reference = exact(name, dtype)
    for kv_dtype in DTYPES:
        for granularity, measured in zip(GRANULARITIES, MEAN_ERRORS[name, kv_dtype], strict=True):
            logits = quantised(benches(name, dtype), runner, kv_dtype, granularity).logits(TOKEN_IDS)
            # Half precision alone moves logits too: bfloat16 by 0.015, measured.
            assert difference(logits, reference, TOKEN_IDS).mean < 1.5 * measured + 0.015, (kv_dtype, granularity)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8_per_token_head"])
def test_a_model_through_transformers_is_quantised_alike(kv_dtype, folders, benches, exact):
    config = EngineConfig.from_flat(model=str(folders["llama"]), model_impl="transformers")
    scales = exact("llama")[0].scales(kv_dtype, by_head, NUM_TOKENS) if kv_dtype == "fp8_e4m3" else ()
    native = benches("llama").runner(kv_dtype, scales).logits(TOKEN_IDS)
    hosted = Bench(config).runner(kv_dtype, scales).logits(TOKEN_IDS)
    # Sums in another order move a code here and there.
    assert difference(hosted, native, TOKEN_IDS).mean < 0.1 * difference(native, exact("llama")[1], TOKEN_IDS).mean


@pytest.mark.parametrize("name", MODELS)
def test_int8_with_a_scale_for_each_token_and_head_is_the_most_accurate(name, benches, exact):
    runner, reference = exact(name)
    errors = {
        (kv_dtype, granularity): difference(
            quantised(benches(name), runner, kv_dtype, granularity).logits(TOKEN_IDS), reference, TOKEN_IDS
        ).mean
        for kv_dtype in DTYPES
        for granularity in GRANULARITIES
    }
    assert min(errors, key=errors.__getitem__) == ("int8", "per_token_head")
    assert all(errors["int8", granularity] < errors["fp8_e4m3", granularity] for granularity in GRANULARITIES)


# -- outliers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outlier_folder(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with keys that are 1000 times larger in a channel of each head, and queries as much smaller."""
    folder = tmp_path_factory.mktemp("outlier") / "llama"
    shutil.copytree(folders["llama"], folder)
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        projections = (weights[f"model.layers.{layer}.self_attn.{kind}_proj.weight"] for kind in "kq")
        for projection, factor in zip(projections, (1000, 1 / 1000), strict=True):
            # Rope turns a channel together with the one half a head further on.
            for channel in (3, 11):
                projection[channel::16] *= factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_outliers_in_a_channel_stay_finite_and_fp8_copes_with_them(outlier_folder, exact):
    bench = Bench(EngineConfig.from_flat(model=str(outlier_folder)))
    runner = bench.runner("float32")
    reference = runner.logits(TOKEN_IDS)
    # The model is the same one.
    assert difference(reference, exact("llama")[1], TOKEN_IDS).largest < 1e-4
    too_small = {dtype: exact("llama")[0].scales(dtype, by_tensor, NUM_TOKENS) for dtype in DTYPES}
    found: dict[tuple[str, str], Difference] = {}
    for dtype in DTYPES:
        for how, tried in {
            "none": bench.runner(dtype),
            "too small": bench.runner(dtype, too_small[dtype]),
            "suitable": bench.runner(dtype, runner.scales(dtype, by_tensor, NUM_TOKENS)),
            "per_token_head": bench.runner(f"{dtype}_per_token_head"),
        }.items():
            logits = tried.logits(TOKEN_IDS)
            assert logits.isfinite().all(), (dtype, how)
            found[dtype, how] = difference(logits, reference, TOKEN_IDS)
    # A floating-point code keeps small numbers beside large ones: as exact as without outliers (0.0802).
    assert found["fp8_e4m3", "per_token_head"].mean < 0.12
    assert found["fp8_e4m3", "per_token_head"].mean < found["fp8_e4m3", "suitable"].mean
    for how in ("none", "too small"):
        assert found["fp8_e4m3", how].mean > 3 * found["fp8_e4m3", "per_token_head"].mean
    # int8 has equal steps, which one channel makes a thousand times wider for its vector: docs say not to use it there.
    assert all(found["int8", how].mean > 0.3 for how in ("none", "too small", "suitable", "per_token_head"))


# -- scales of the checkpoint -----------------------------------------------------------------------------------


def with_scale(folders: dict[str, Path], folder: Path, scale: float, kv_dtype: str = "fp8_e4m3") -> Path:
    shutil.copytree(folders["llama"], folder)
    say_what_scales_are_for(folder, kv_dtype)
    return tiny_models.add_kv_scales(folder, [LayerScales((scale,), (scale,))] * 2)


def codes_of(engine: EngineCore, kv_dtype: str) -> torch.Tensor:
    """Return what the first block of the first layer holds, as numbers without scales."""
    kv_format = KV_FORMATS[kv_dtype]
    return kv_format.dequantise(engine.runner.kv_cache_buffers[0][1].view(kv_format.torch_dtype), None)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_scales_of_the_checkpoint_reach_the_pages(kv_dtype, folders, tmp_path, make_engine):
    codes = {}
    for scale in (1.0, 0.5):
        engine = make_engine(with_scale(folders, tmp_path / f"{scale}", scale, kv_dtype), kv_cache_dtype=kv_dtype)
        engine.add_request("r", TOKEN_IDS[:40], SamplingParams(temperature=0, max_tokens=2))
        run_to_end(engine)
        codes[scale] = codes_of(engine, kv_dtype)
    assert codes[1.0].count_nonzero() > 0.6 * codes[1.0].numel()
    assert not torch.equal(codes[0.5], codes[1.0])
    # Of fp8, half the scale moves the exponent alone, except in the smallest numbers, whose steps are 2**-9.
    assert (codes[0.5] - 2 * codes[1.0]).abs().max() <= (2**-9 if kv_dtype == "fp8_e4m3" else 1)


def test_each_layer_has_its_own_scales(folders, tmp_path, make_engine):
    buffers = []
    for scale in (0.1, 0.05):
        folder = tmp_path / f"{scale}"
        shutil.copytree(folders["llama"], folder)
        tiny_models.add_kv_scales(folder, [LayerScales((0.5,), (0.5,)), LayerScales((scale,), (scale,))])
        say_what_scales_are_for(folder, "int8")
        engine = make_engine(folder, kv_cache_dtype="int8")
        engine.add_request("r", TOKEN_IDS[:15], SamplingParams(temperature=0, max_tokens=1))
        run_to_end(engine)
        buffers.append([buffer[1].view(torch.int8).int() for buffer in engine.runner.kv_cache_buffers])
    (first, second), (first_again, second_finer) = buffers
    assert first.any()
    assert torch.equal(first, first_again)
    assert second.abs().max() > 30
    # But where codes have reached their end.
    assert ((second_finer - 2 * second).abs() <= 1)[second.abs() < 63].all()


def test_a_finer_scale_of_the_checkpoint_lowers_the_error_of_int8(folders, tmp_path, exact):
    errors = {}
    for scale in (1.0, 0.5, 0.25):
        config = EngineConfig.from_flat(
            model=str(with_scale(folders, tmp_path / f"{scale}", scale, "int8")), kv_cache_dtype="int8"
        )
        scales = model_needs(config, scan()).kv_scales.layers
        assert scales == (LayerScales((scale,), (scale,)),) * 2
        logits = Bench(config).runner("int8", scales).logits(TOKEN_IDS)
        errors[scale] = difference(logits, exact("llama")[1], TOKEN_IDS).mean
    # Measured: 0.51, 0.28 and 0.14.
    assert errors[0.5] < 0.65 * errors[1.0]
    assert errors[0.25] < 0.65 * errors[0.5]


def test_scales_made_for_fp8_serve_int8_without_a_word_in_the_config(folders, tmp_path, exact):
    runner, reference = exact("llama")
    folder = tmp_path / "unsaid"
    shutil.copytree(folders["llama"], folder)
    tiny_models.add_kv_scales(folder, runner.scales("fp8_e4m3", by_tensor, NUM_TOKENS))
    config = EngineConfig.from_flat(model=str(folder), kv_cache_dtype="int8")
    logits = Bench(config).runner("int8", model_needs(config, scan()).kv_scales.layers).logits(TOKEN_IDS)
    # Taken as they are they would cut off all beyond 127 / 448 of the range, which costs 0.9.
    assert difference(logits, reference, TOKEN_IDS).mean == pytest.approx(MEAN_ERRORS["llama", "int8"][0], rel=0.2)


def origin_of(folder: Path, **settings: Any) -> str:
    return model_needs(EngineConfig.from_flat(model=str(folder), **settings), scan()).kv_scales.origin


def test_the_report_says_where_scales_come_from(folders, scaled):
    by_tensor_folder, by_head_folder = scaled("llama", "int8", "per_tensor"), scaled("llama", "int8", "per_head")
    assert origin_of(by_tensor_folder, kv_cache_dtype="int8") == (
        "one for keys and one for values of each layer, from the checkpoint, by default"
    )
    assert origin_of(by_head_folder, kv_cache_dtype="int8") == "one for each KV head, from the checkpoint, by default"
    in_pages = "one for each token and head, kept in the page, by "
    assert origin_of(folders["llama"], kv_cache_dtype="int8") == f"{in_pages}default; 'auto': the checkpoint has none"
    settings = {"kv_cache_dtype": "int8", "kv_cache_scales": "per_token_head"}
    assert origin_of(by_head_folder, **settings) == f"{in_pages}argument"
    assert origin_of(folders["llama"], kv_cache_dtype="fp8_e4m3", kv_cache_scales="per_head") == (
        "1.0, for the checkpoint has none, by argument"
    )
    assert origin_of(folders["llama"]) == ""
    assert origin_of(scaled("deepseek_v3", "int8", "per_tensor"), kv_cache_dtype="int8") == (
        "one for the latents of each layer, from the checkpoint, by default"
    )


def test_the_selection_shows_it_for_a_quantised_cache_alone(folders):
    config = EngineConfig.from_flat(model=str(folders["llama"]), kv_cache_dtype="int8")
    assert [line for line in select(config, scan()).lines() if "scales" in line] == [
        "KV-cache scales: one for each token and head, kept in the page, by default; 'auto': the checkpoint has none"
    ]
    plain = EngineConfig.from_flat(model=str(folders["llama"]))
    assert not any("scales" in line for line in select(plain, scan()).lines())


def test_scales_are_made_as_coarse_or_as_fine_as_they_are_asked_for(scaled):
    def layers_of(folder: Path, scales: str) -> Any:
        config = EngineConfig.from_flat(model=str(folder), kv_cache_dtype="int8", kv_cache_scales=scales)
        return model_needs(config, scan()).kv_scales.layers

    by_head_folder, by_tensor_folder = scaled("llama", "int8", "per_head"), scaled("llama", "int8", "per_tensor")
    finest = layers_of(by_head_folder, "auto")
    assert all(len(scales.key) == len(scales.value) == 2 for scales in finest)
    assert layers_of(by_head_folder, "per_head") == finest
    coarse = tuple(LayerScales((max(scales.key),), (max(scales.value),)) for scales in finest)
    assert layers_of(by_head_folder, "per_tensor") == coarse
    assert layers_of(by_tensor_folder, "per_tensor") == layers_of(by_tensor_folder, "per_head") == coarse
    assert layers_of(by_head_folder, "per_token_head") == ()


def test_without_scales_each_token_gets_its_own_and_one_warning_says_what_that_costs(folders, caplog):
    needs = model_needs(EngineConfig.from_flat(model=str(folders["llama"]), kv_cache_dtype="fp8_e4m3"), scan())
    assert needs.spec.attention_specs[0].kv_dtype == "fp8_e4m3_per_token_head"
    assert warnings_of(caplog) == [
        "The checkpoint has no scales for a KV cache in fp8_e4m3, so each token and head has its own, kept in the "
        "page: 4 bytes beside 16, 25.0% more than with scales of the checkpoint. kv_cache_scales='per_token_head' says "
        "that this is meant."
    ]


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_scales_in_the_page_that_are_asked_for_need_no_warning(kv_dtype, folders, caplog):
    settings = {"kv_cache_dtype": kv_dtype, "kv_cache_scales": "per_token_head"}
    model_needs(EngineConfig.from_flat(model=str(folders["llama"]), **settings), scan())
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("scales", ["per_tensor", "per_head"])
def test_fp8_without_scales_takes_1_and_one_warning_says_so(scales, folders, make_engine, caplog):
    make_engine(folders["llama"], kv_cache_dtype="fp8_e4m3", kv_cache_scales=scales)
    assert warnings_of(caplog) == [
        f"The checkpoint has no scales for a KV cache in fp8_e4m3, and kv_cache_scales is {scales!r}, so all scales "
        "are 1.0: numbers beyond 448 are cut off, and small ones lose digits. Compare the answers, or set "
        "kv_cache_scales='per_token_head'."
    ]


@pytest.mark.parametrize("scales", ["per_tensor", "per_head"])
def test_int8_without_scales_is_refused(scales, folders):
    config = EngineConfig.from_flat(model=str(folders["llama"]), kv_cache_dtype="int8", kv_cache_scales=scales)
    with pytest.raises(ConfigError) as caught:
        model_needs(config, scan())
    assert str(caught.value) == (
        f"kv_cache_scales is {scales!r} and kv_cache_dtype 'int8', and the checkpoint has no scales for the KV cache: "
        "with 1.0 only the whole numbers of keys and values would be kept, and nearly everything lost. Set "
        "kv_cache_scales='per_token_head', or take kv_cache_dtype='fp8_e4m3'."
    )


def test_scales_that_cannot_be_used_name_the_model_and_the_tensor_before_weights_are_read(folders, tmp_path):
    folder = with_scale(folders, tmp_path / "broken", float("nan"))
    with pytest.raises(CheckpointError) as caught:
        model_needs(EngineConfig.from_flat(model=str(folder), kv_cache_dtype="fp8_e4m3"), scan())
    assert str(caught.value) == (
        f"In {str(folder)!r}: The KV-cache scale 'model.layers.0.self_attn.k_scale' is nan; it has to be a positive, "
        "finite number. Set kv_cache_scales='per_token_head', which reads no scales of the checkpoint."
    )
    settings = {"kv_cache_dtype": "fp8_e4m3", "kv_cache_scales": "per_token_head"}
    assert model_needs(EngineConfig.from_flat(model=str(folder), **settings), scan()).kv_scales.layers == ()


# -- hits, chunks, preemption, batches --------------------------------------------------------------------------

# In float32 all of this changes no token. Sums in another order do move the last digits of new keys, and so some codes
# by one: up to 2% of them were measured to differ between chunks of one token and whole prompts.
PROMPTS = [random.Random(length).choices(range(3, 512), k=length) for length in (70, 52, 91, 64)]
CASES = [
    *[("llama", kv_dtype, scales) for kv_dtype in DTYPES for scales in ("static", "per_token_head")],
    *[(name, "fp8_e4m3", "static") for name in MODELS if name != "llama"],
    *[(name, "int8", "per_token_head") for name in MODELS if name != "llama"],
]


@pytest.fixture
def engine_of(folders, scaled, make_engine) -> Callable[..., EngineCore]:
    """Makes an engine of a model with a KV cache in a format."""

    def make(case: tuple[str, str, str], **settings: Any) -> EngineCore:
        name, kv_dtype, scales = case
        if scales == "static":
            return make_engine(scaled(name, kv_dtype, "per_head"), kv_cache_dtype=kv_dtype, **settings)
        return make_engine(folders[name], kv_cache_dtype=kv_dtype, kv_cache_scales=scales, **settings)

    return make


def answers(engine: EngineCore, prompts: list[list[int]], num_new_tokens: int = 12) -> list[Finished]:
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
        engine.add_request(f"{number}", prompt, params)
    finished = run_to_end(engine)
    return [finished[f"{number}"] for number in range(len(prompts))]


def tokens(results: list[Finished]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_hits_chunks_and_company_change_no_token(case, engine_of):
    cold = engine_of(case, enable_prefix_caching=False)
    expected = [answers(cold, [prompt])[0].token_ids for prompt in PROMPTS]
    assert len({tuple(token_ids) for token_ids in expected}) == len(PROMPTS)

    engine = engine_of(case)
    assert tokens(answers(engine, PROMPTS)) == expected
    again = answers(engine, PROMPTS)
    assert tokens(again) == expected
    assert [result.num_cached_tokens for result in again] == [64, 48, 80, 48]

    chunked = engine_of(case, max_num_batched_tokens=7, max_num_seqs=4, enable_prefix_caching=False)
    assert tokens(answers(chunked, PROMPTS)) == expected


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_preemption_changes_no_token(case, engine_of, folders):
    # Short prompts, so that several are admitted, and then grow to where the memory holds one of them.
    prompts = [prompt[:length] for prompt, length in zip(PROMPTS, (5, 9, 12, 20), strict=True)]
    cold = engine_of(case, enable_prefix_caching=False)
    expected = [answers(cold, [prompt], num_new_tokens=40)[0].token_ids for prompt in prompts]
    settings = {"block_size": 1, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    crowded = engine_of(case, num_kv_blocks=1 + blocks_of_a_request(folders[case[0]], 60, **settings), **settings)
    results = answers(crowded, prompts, num_new_tokens=40)
    assert tokens(results) == expected
    assert sum(result.num_preemptions for result in results) > 0


def blocks_of_a_request(folder: Path, num_tokens: int, **settings: Any) -> int:
    """Return the most blocks that a request of so many tokens holds."""
    config = EngineConfig.from_flat(model=str(folder), **settings)
    selection = select(config, scan())
    managers, groups = zip(*[(of_group.manager, of_group.group) for of_group in selection.groups], strict=True)
    return request_cost(config, managers, groups).num_blocks(num_tokens)


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_codes_of_a_prompt_in_chunks_are_those_of_the_whole_prompt(kv_dtype, engine_of):
    codes = []
    for budget in (7, 2048):
        engine = engine_of(("llama", kv_dtype, "static"), max_num_batched_tokens=budget, max_num_seqs=4)
        answers(engine, PROMPTS[:1])
        codes.append(torch.stack([buffer[1:5] for buffer in engine.runner.kv_cache_buffers]))
    share_that_differs = float((codes[0] != codes[1]).float().mean())
    # 7e-5 was measured.
    assert share_that_differs < 0.005


# -- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "page_bytes"),
    [
        ({}, 4096),
        ({"kv_cache_dtype": "float16"}, 2048),
        ({"kv_cache_dtype": "fp8_e4m3", "kv_cache_scales": "per_tensor"}, 1024),
        ({"kv_cache_dtype": "fp8_e4m3", "kv_cache_scales": "per_token_head"}, 1024 + 256),
        ({"kv_cache_dtype": "int8", "kv_cache_scales": "per_token_head"}, 1024 + 256),
    ],
)
def test_the_same_memory_holds_as_many_more_blocks(settings, page_bytes, folders, make_engine):
    engine = make_engine(folders["llama"], num_kv_blocks=None, kv_cache_memory_bytes=2**20, **settings)
    assert [buffer.shape[1] for buffer in engine.runner.kv_cache_buffers] == [page_bytes] * 2
    assert engine.scheduler.kv_cache_manager.pool.num_blocks == 2**20 // (2 * page_bytes)


# -- trained models ---------------------------------------------------------------------------------------------

# Mean |difference| of a logit on the first tokens of TEXT, as for the tiny models, and the KL divergence in nats.
TRAINED = {
    ("demo_gguf", "fp8_e4m3"): ((0.21, 0.20, 0.16), 0.0055),
    ("demo_gguf", "int8"): ((0.140, 0.138, 0.065), 0.0021),
    ("gemma3_gguf", "fp8_e4m3"): ((0.135, 0.135, 0.124), 0.0061),
    ("gemma3_gguf", "int8"): ((0.246, 0.246, 0.140), 0.0157),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kv_dtype"), TRAINED)
def test_the_error_with_a_trained_model_is_what_was_measured(model, kv_dtype, request):
    bench = Bench(EngineConfig.from_flat(model=str(request.getfixturevalue(model))))
    token_ids = bench.encode(TEXT)[:NUM_TOKENS]
    runner = bench.runner("float32")
    reference = runner.logits(token_ids)
    means, divergence = TRAINED[model, kv_dtype]
    for granularity, mean in zip(GRANULARITIES, means, strict=True):
        found = difference(quantised(bench, runner, kv_dtype, granularity).logits(token_ids), reference, token_ids)
        assert mean / 2 < found.mean < 2 * mean, (granularity, found)
        assert found.divergence < 2.5 * divergence, (granularity, found)
        assert found.agreement > 0.9, (granularity, found)
        assert found.perplexity == pytest.approx(found.reference_perplexity, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["demo_gguf", "gemma3_gguf"])
def test_chunks_move_a_trained_models_logits_by_less_than_the_format_does(model, request):
    bench = Bench(EngineConfig.from_flat(model=str(request.getfixturevalue(model))))
    token_ids = bench.encode(TEXT)[:160]

    def logits(kv_dtype: str, chunk_size: int) -> torch.Tensor:
        runner = bench.runner(kv_dtype)
        for start in range(0, 128, chunk_size):
            runner.fill(token_ids, start, start + chunk_size)
        return runner.logits(token_ids, 128)

    exact = logits("float32", 128)
    assert difference(logits("float32", 1), exact, token_ids[128:]).mean < 1e-4
    for kv_dtype in ("fp8_e4m3", "fp8_e4m3_per_token_head", "int8_per_token_head"):
        whole = logits(kv_dtype, 128)
        error = difference(whole, exact, token_ids[128:]).mean
        # A code that is moved by one moves others in the layers behind it. 0.3 to 0.7 of the error was measured.
        assert difference(logits(kv_dtype, 1), whole, token_ids[128:]).mean < error, kv_dtype
        assert difference(logits(kv_dtype, 16), whole, token_ids[128:]).mean < error, kv_dtype
