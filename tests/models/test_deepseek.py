"""DeepSeek V2 and V3 against transformers, in float32: latent attention in both of its ways, and experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_models import reference_logits
from paged_model import CountingBackend, PagedModel, WithoutGather, paged
from spec_models import ChangedCheckpoint
from torch import Tensor

from octavo.core.interfaces import Checkpoint, MLASpec
from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.deepseek import DeepseekModel
from octavo.testing.tiny_models import tiny_deepseek_v2, tiny_deepseek_v3

PROMPT = [(37 * i + 11) % 509 for i in range(96)]
MAKERS: dict[str, Callable[..., Path]] = {"v2": tiny_deepseek_v2, "v3": tiny_deepseek_v3}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# With these, expanding is always the cheaper for rows of several tokens, or never.
WIDE_LATENTS = {"kv_lora_rank": 128, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
NARROW_LATENTS = {"kv_lora_rank": 8}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2": ("v2", {}),
    "V2 with compressed queries": ("v2", {"q_lora_rank": 24}),
    "V2 without groups": ("v2", {"topk_method": "greedy", "n_group": None, "topk_group": None}),
    "V2 with two groups a token": ("v2", {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}),
    "V2 with biases": ("v2", {"q_lora_rank": 24, "attention_bias": True, "mlp_bias": True}),
    "V2 with biases and plain queries": ("v2", {"attention_bias": True}),
    "V2 with plain rope": ("v2", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "V2 with a scale of one and one shared expert": ("v2", {"routed_scaling_factor": 1.0, "n_shared_experts": 1}),
    "V2 without dense layers": ("v2", {"first_k_dense_replace": 0}),
    "V2 without experts": ("v2", {"first_k_dense_replace": 3}),
    "V2 with another activation": ("v2", {"hidden_act": "gelu_pytorch_tanh"}),
    "V2 with another epsilon": ("v2", {"rms_norm_eps": 0.3}),
    "V3": ("v3", {}),
    "V3 with plain queries": ("v3", {"q_lora_rank": None}),
    "V3 with one group": ("v3", {"n_group": 1, "topk_group": 1}),
    "V3 with all groups": ("v3", {"topk_group": 2, "num_experts_per_tok": 3}),
    "V3 with weights as they are": ("v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
    "V3 with halves side by side": ("v3", {"rope_interleave": False}),
    "V3 with a stretched rope": ("v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "V3 with a stretched rope and no scale of its own": ("v3", {"rope_parameters": YARN}),
    "V3 with two scales": ("v3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "V3 with biases": ("v3", {"attention_bias": True}),
    "V3 with tied embeddings": ("v3", {"tie_word_embeddings": True}),
    "V3 with values wider than keys": ("v3", {"v_head_dim": 40}),
    "V3 with one dimension of position": ("v3", {"qk_rope_head_dim": 2}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}


@pytest.fixture(scope="module")
def checkpoints(folders: dict[str, Path]) -> dict[str, Checkpoint]:
    return {name: open_checkpoint(str(folder)) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, Tensor]:
    return {name: reference_logits(folder, PROMPT) for name, folder in folders.items()}


def paged_folder(folder: Path, backend_class: type[CountingBackend] = CountingBackend) -> PagedModel:
    return paged(DeepseekModel, open_checkpoint(str(folder)), backend_class)


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


# -- the same numbers as transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tiny_model_computes_what_transformers_computes(variant: str, tmp_path: Path) -> None:
    family, config = VARIANTS[variant]
    folder = MAKERS[family](tmp_path, **config)
    model = paged_folder(folder)
    expected = reference_logits(folder, PROMPT[:48])
    assert_close(model.in_chunks(PROMPT[:48], 48), expected)
    assert_close(model.in_chunks(PROMPT[:48], 7), expected)


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize("chunk_size", [96, 48, 17, 5, 1])
def test_a_prompt_in_pieces_computes_what_a_whole_one_does(
    family: str, chunk_size: int, checkpoints: dict[str, Checkpoint], references: dict[str, Tensor]
) -> None:
    assert_close(paged(DeepseekModel, checkpoints[family]).in_chunks(PROMPT, chunk_size), references[family])


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize("chunk_size", [96, 48, 17, 5])
def test_absorbed_and_expanded_are_the_same(family: str, chunk_size: int, tmp_path: Path) -> None:
    folder = MAKERS[family](tmp_path, **WIDE_LATENTS)
    expanding, absorbing = paged_folder(folder), paged_folder(folder, WithoutGather)
    expanded, absorbed = (model.in_chunks(PROMPT, chunk_size) for model in (expanding, absorbing))
    assert_close(expanded, absorbed)
    assert torch.equal(expanded.argmax(dim=1), absorbed.argmax(dim=1))
    assert_close(expanded, reference_logits(folder, PROMPT))
    num_layers, num_rest = len(expanding.spec.attention_specs), len(PROMPT) % chunk_size
    # A last piece of one token is a decode row, which is never expanded.
    assert expanding.backend.num_attended == (num_layers if num_rest == 1 else 0)
    assert absorbing.backend.num_attended == num_layers * len(PROMPT)
    assert absorbing.backend.num_gathered == 0


def test_short_latents_are_never_expanded(tmp_path: Path) -> None:
    folder = tiny_deepseek_v3(tmp_path, **NARROW_LATENTS)
    model = paged_folder(folder)
    assert_close(model.in_chunks(PROMPT, 48), reference_logits(folder, PROMPT))
    assert model.backend.num_gathered == 0


@pytest.mark.parametrize("family", MAKERS)
def test_rows_that_take_either_way_meet_in_one_step(
    family: str, checkpoints: dict[str, Checkpoint], references: dict[str, Tensor]
) -> None:
    model, expected = paged(DeepseekModel, checkpoints[family]), references[family]
    decoding, beginning, ending, middle = (model.request() for _ in range(4))
    model.step([(decoding, PROMPT[:40]), (ending, PROMPT[:90]), (middle, PROMPT[:30])])
    model.backend.num_attended = model.backend.num_gathered = 0
    pieces = [(decoding, 40, 41), (beginning, 0, 70), (ending, 90, 96), (middle, 30, 80)]
    logits = model.step([(request, PROMPT[start:end]) for request, start, end in pieces])
    assert_close(logits, torch.cat([expected[start:end] for _, start, end in pieces]))
    num_layers = len(model.spec.attention_specs)
    assert model.backend.num_attended == num_layers * (1 + 6)
    assert model.backend.num_gathered == num_layers * (70 + 80)


def test_long_rows_are_cut_into_pieces_of_heads_and_of_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_deepseek_v3(tmp_path, **WIDE_LATENTS, max_position_embeddings=1024)
    token_ids = (PROMPT * 7)[:600]
    whole = paged_folder(folder).in_chunks(token_ids, 300)
    # Three heads of four at a time, for the longest row.
    monkeypatch.setattr("octavo.core.latent_attention.SCRATCH_BYTES_CPU", 3 * 2 * 600 * 12 * 4)
    monkeypatch.setattr("octavo.core.latent_attention.QUERIES_PER_TILE", 7)
    assert_close(paged_folder(folder).in_chunks(token_ids, 300), whole)


def test_bfloat16_stays_close_and_its_router_stays_in_float32(checkpoints: dict[str, Checkpoint]) -> None:
    exact = paged(DeepseekModel, checkpoints["v3"]).in_chunks(PROMPT, 48)
    rounded = paged(DeepseekModel, checkpoints["v3"], dtype="bfloat16").in_chunks(PROMPT, 48)
    assert rounded.dtype == torch.bfloat16
    # A router that sees rounded numbers sends some tokens elsewhere, in transformers as well.
    differences = (rounded.float() - exact).abs().amax(dim=1)
    assert differences.median() < 0.05 * exact.abs().max()


# -- what is kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize(("dtype", "dtype_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_a_page_holds_one_vector_a_token(
    family: str, dtype: str, dtype_bytes: int, checkpoints: dict[str, Checkpoint]
) -> None:
    model = paged(DeepseekModel, checkpoints[family], dtype=dtype)
    assert set(model.spec.kv_cache_specs) == {MLASpec(block_size=4, latent_dim=32, rope_dim=8, dtype=dtype)}
    page_bytes = 4 * (32 + 8) * dtype_bytes
    assert {spec.page_bytes for spec in model.spec.kv_cache_specs} == {page_bytes}
    assert {buffer.shape for buffer in model.kv_cache_buffers} == {(model.num_blocks, page_bytes)}


def test_attention_is_to_latents_with_one_kv_head_whose_key_begins_with_its_value(
    checkpoints: dict[str, Checkpoint],
) -> None:
    (spec,) = set(paged(DeepseekModel, checkpoints["v3"]).spec.attention_specs)
    assert (spec.num_query_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim_v) == (4, 1, 40, 32)
    assert spec.value_is_key_prefix
    assert spec.scale == 24**-0.5


def test_a_stretched_rope_scales_the_products_too(checkpoints: dict[str, Checkpoint]) -> None:
    (spec,) = set(paged(DeepseekModel, checkpoints["v2"]).spec.attention_specs)
    # 0.1 * 0.707 * ln(8) + 1 = 1.14702, which a query and a key each are multiplied with.
    assert spec.scale == pytest.approx(24**-0.5 * 1.147016**2, rel=1e-5)


# -- checkpoints --------------------------------------------------------------------------------------------------


def stacked_experts(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with the experts of a layer in one tensor, as transformers has them."""
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.tensor_names()}
    prefixes = {name.partition(".experts.")[0] + ".experts" for name in tensors if ".experts.0." in name}
    for prefix in prefixes:
        count = sum(name.startswith(f"{prefix}.") and name.endswith("down_proj.weight") for name in tensors)
        one_by_one = [
            [tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for expert in range(count)
        ]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in one_by_one])
        tensors[f"{prefix}.down_proj"] = torch.stack([down for _, _, down in one_by_one])
    return tensors


class Tensors(ChangedCheckpoint):
    """A checkpoint's config with other tensors."""

    def tensor_names(self) -> list[str]:
        return [*self._tensors]

    def tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"no {name}")
        return self._tensors[name]


@pytest.mark.parametrize("family", MAKERS)
def test_experts_may_be_stored_one_by_one_or_stacked(family: str, checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints[family]
    stacked = Tensors(checkpoint, tensors=stacked_experts(checkpoint))
    one_by_one, together = (paged(DeepseekModel, each).in_chunks(PROMPT, 96) for each in (checkpoint, stacked))
    assert torch.equal(one_by_one, together)


def test_layers_that_predict_further_tokens_are_left_out(checkpoints: dict[str, Checkpoint]) -> None:
    checkpoint = checkpoints["v3"]
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128), "model.layers.2.enorm.weight": torch.zeros(64)}
    computed_anyway = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    model = paged(DeepseekModel, ChangedCheckpoint(checkpoint, tensors=extra | computed_anyway))
    assert torch.equal(model.in_chunks(PROMPT, 96), paged(DeepseekModel, checkpoint).in_chunks(PROMPT, 96))


def test_what_has_no_place_in_the_model_is_refused(checkpoints: dict[str, Checkpoint]) -> None:
    without_extra_layers = {"num_nextn_predict_layers": 0}
    extra = {"model.layers.2.enorm.weight": torch.zeros(64)}
    with pytest.raises(UnsupportedModelError) as refusal:
        paged(DeepseekModel, ChangedCheckpoint(checkpoints["v3"], without_extra_layers, extra))
    assert str(refusal.value) == (
        "The checkpoint holds 1 tensor that the model of its config has no place for, 'model.layers.2.enorm.weight' "
        "the first. The model is a variant that is not computed here, or the config is wrong."
    )


def test_a_missing_tensor_is_named(checkpoints: dict[str, Checkpoint]) -> None:
    tensors = stacked_experts(checkpoints["v3"])
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    with pytest.raises(CheckpointError, match=r"^no model\.layers\.1\.mlp\.gate\.e_score_correction_bias$"):
        paged(DeepseekModel, Tensors(checkpoints["v3"], tensors=tensors))


# -- configs ------------------------------------------------------------------------------------------------------

PLUGIN = "A model class that computes it can be added as a plugin."
NOT_SUPPORTED = "which changes what the model computes and is not supported."
# As DeepSeek-V3 comes from the hub.
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        (
            "v3",
            {"quantization_config": FP8},
            "The config sets quantization_config to {'activation_scheme': 'dynamic', 'fmt': 'e4m3', 'quant_method': "
            f"'fp8', 'weight_block_size': [128, 128]}}, {NOT_SUPPORTED} Use a copy of the model that is not quantised, "
            "or a GGUF file.",
        ),
        (
            "v3",
            {"model_type": "deepseek_v32"},
            "The config's model_type is 'deepseek_v32'; this class runs deepseek_v2, deepseek_v3.",
        ),
        ("v3", {"scoring_func": "softmax"}, f"The config sets scoring_func to 'softmax', {NOT_SUPPORTED} {PLUGIN}"),
        ("v3", {"topk_method": "greedy"}, f"The config sets topk_method to 'greedy', {NOT_SUPPORTED} {PLUGIN}"),
        ("v3", {"index_topk": 2048}, f"The config sets index_topk to 2048, {NOT_SUPPORTED} {PLUGIN}"),
        ("v2", {"topk_method": "noaux_tc"}, f"The config sets topk_method to 'noaux_tc', {NOT_SUPPORTED} {PLUGIN}"),
        ("v2", {"norm_topk_prob": True}, f"The config sets norm_topk_prob to True, {NOT_SUPPORTED} {PLUGIN}"),
        ("v2", {"moe_layer_freq": 2}, f"The config sets moe_layer_freq to 2, {NOT_SUPPORTED} {PLUGIN}"),
        ("v2", {"sliding_window": 64}, f"The config sets sliding_window to 64, {NOT_SUPPORTED} {PLUGIN}"),
        (
            "v2",
            {"num_key_value_heads": 2},
            "The config gives 4 query heads and 2 KV heads; with latent attention every query head has a key and a "
            "value of its own.",
        ),
        (
            "v2",
            {"hidden_act": "swish2"},
            "The config asks for the activation 'swish2' (hidden_act). Known: silu, swish, gelu, gelu_new, "
            "gelu_pytorch_tanh, relu, relu6, mish, tanh, sigmoid.",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused(
    family: str, changes: dict[str, Any], sentence: str, checkpoints: dict[str, Checkpoint]
) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        spec_from(checkpoints[family], changes)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        (
            "v3",
            {"n_group": 3},
            "The config gives 4 experts (n_routed_experts) in 3 groups (n_group); every group has to have equally "
            "many, 2 at least.",
        ),
        (
            "v3",
            {"n_group": 4},
            "The config gives 4 experts (n_routed_experts) in 4 groups (n_group); every group has to have equally "
            "many, 2 at least.",
        ),
        (
            "v3",
            {"num_experts_per_tok": 3},
            "The config sends a token to 3 experts (num_experts_per_tok) of 1 groups (topk_group); there are 2 groups "
            "of 2 experts.",
        ),
        (
            "v2",
            {"topk_group": 3},
            "The config sends a token to 2 experts (num_experts_per_tok) of 3 groups (topk_group); there are 2 groups "
            "of 4 experts.",
        ),
        ("v2", {"n_group": None}, "The config lacks 'n_group', which every model of its kind needs."),
        (
            "v2",
            {"num_experts_per_tok": None},
            "The config lacks 'num_experts_per_tok', which every model of its kind needs.",
        ),
        ("v2", {"qk_rope_head_dim": 7}, "The config gives 7 as qk_rope_head_dim; it has to be even."),
        (
            "v3",
            {"head_dim": 1},
            "The config gives 1 as head_dim and 8 as qk_rope_head_dim; they have to be the same, or head_dim left out.",
        ),
        ("v2", {"kv_lora_rank": 0}, "The config gives 0 as kv_lora_rank; it has to be positive."),
        ("v3", {"q_lora_rank": 0.5}, "The config gives 0.5 as q_lora_rank; it has to be a whole number."),
        (
            "v3",
            {"rope_interleave": 1},
            "The config gives 1 as rope_interleave; it has to be true or false.",
        ),
        (
            "v2",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": "one"}},
            "The config gives 'one' as mscale_all_dim of the rope type 'linear'; it has to be a number.",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_named(
    family: str, changes: dict[str, Any], sentence: str, checkpoints: dict[str, Checkpoint]
) -> None:
    with pytest.raises(CheckpointError) as complaint:
        spec_from(checkpoints[family], changes)
    assert str(complaint.value) == sentence


@pytest.mark.parametrize("family", MAKERS)
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str) -> None:
    import transformers

    stated = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 512,
    }
    made = getattr(transformers, f"Deepseek{family.upper()}Config")(**stated).to_dict()
    left_out = {"model_type": f"deepseek_{family}"} | stated
    assert spec_of_config(left_out) == spec_of_config(made)


def spec_from(checkpoint: Checkpoint, changes: dict[str, Any]) -> Any:
    return spec_of_config(dict(checkpoint.config) | changes)


def spec_of_config(config: dict[str, Any]) -> Any:
    return DeepseekModel.spec_from_config(config, dtype="float32", device="cpu", block_size=16, kv_dtype="float32")
