"""What cannot be served through transformers is refused, with the reason and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import odd_models
import pytest
import torch
from adapted_models import load, spec_of

from octavo.errors import UnsupportedModelError

OTHER_WAY = (
    " It cannot be served through transformers; use another model, or install a package that registers a model for it, "
    "and name it in model_impl."
)


# -- refused by its config --------------------------------------------------------------------------------------


REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "alibi": (
        {"model_type": "bloom", "hidden_size": 64, "n_layer": 1, "n_head": 4},
        "BloomForCausalLM computes its attention itself (transformers' attention interface was never called), so "
        "Octavo cannot page its keys and values." + OTHER_WAY,
    ),
    "a list of its own": (
        {"model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 64, "num_attention_heads": 4},
        "FalconForCausalLM computes its attention itself, or takes it from a list of its own (KeyError: "
        "'octavo_recording'), so Octavo cannot page its keys and values." + OTHER_WAY,
    ),
    "a mask of its own": (
        {"model_type": "doge", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
        "DogeForCausalLM adds something to its attention scores through the mask (a bias such as ALiBi, or a pattern "
        "of its own), and Octavo's attention takes no such term." + OTHER_WAY,
    ),
    "not causal": (
        {"model_type": "bert", "num_hidden_layers": 1},
        "BertLMHeadModel uses a mask that is neither causal nor a causal window, nor one of aligned chunks, up to "
        "position 511." + OTHER_WAY,
    ),
    "twice": (
        {"model_type": "diffllama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
        "DiffLlamaForCausalLM calls attention more than once in one pass of 'model.layers.0.self_attn', and Octavo "
        "keeps one set of keys and values for each pass of a layer." + OTHER_WAY,
    ),
    "not a language model": (
        {"model_type": "vit", "architectures": ["ViTModel"]},
        "ViTModel: transformers has no model of the type 'vit' that continues text (no causal language model), so "
        "there is nothing to generate with. Use a decoder-only language model.",
    ),
    "quantised": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": {"bits": 4}},
        "LlamaForCausalLM has quantised weights (quantization_config), which are not run through transformers. Use a "
        "checkpoint whose weights are not quantised, or a GGUF file.",
    ),
    "a rope of GGUF files": (
        {"model_type": "llama", "rope_parameters": {"rope_type": "frequency_factors", "rope_theta": 1e4}},
        "transformers {version} cannot build model_type 'llama' from its config: KeyError: 'frequency_factors'. The "
        "config is wrong, or made for another version of transformers.",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_a_config_that_cannot_be_served_is_refused_with_the_reason(name):
    import transformers

    config, sentence = REFUSED_CONFIGS[name]
    with pytest.raises(UnsupportedModelError) as refusal:
        spec_of(config)
    assert str(refusal.value) == sentence.replace("{version}", transformers.__version__)


def test_attention_that_transformers_does_not_hand_out_is_refused():
    with pytest.raises(UnsupportedModelError, match="so Octavo cannot page its keys and values"):
        spec_of({"model_type": "mpt", "n_layers": 2})


def test_a_mask_that_changes_in_a_long_sequence_is_refused(odd_folder):
    with pytest.raises(UnsupportedModelError) as refusal:
        spec_of(odd_folder("adds a bias when it is long"))
    assert str(refusal.value) == (
        "OddForCausalLM adds something to its attention scores through the mask (a bias such as ALiBi, or a pattern of "
        "its own), and Octavo's attention takes no such term." + OTHER_WAY
    )


def test_a_model_that_transformers_does_not_know_is_refused():
    import transformers

    with pytest.raises(UnsupportedModelError) as refusal:
        spec_of({"model_type": "my_model", "architectures": ["MyModel"]})
    assert str(refusal.value) == (
        f"MyModel (model_type 'my_model') is known neither to Octavo nor to transformers {transformers.__version__}. "
        "Install a newer transformers if that knows it, or a package that registers a model for it, and name it in "
        "model_impl."
    )


# -- refused by what it computes --------------------------------------------------------------------------------


@pytest.fixture
def odd_folder(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    with odd_models.known_to_transformers():
        yield lambda oddity: odd_models.save(tmp_path, oddity)


ODDITIES = {
    "has no attention": (
        "has no attention: what it remembers of earlier tokens is a state of its own, and Octavo keeps keys and values "
        "only"
    ),
    "computes attention itself": (
        "computes its attention itself (transformers' attention interface was never called), so Octavo cannot page its "
        "keys and values"
    ),
    "adds a bias to the mask": (
        "adds something to its attention scores through the mask (a bias such as ALiBi, or a pattern of its own), and "
        "Octavo's attention takes no such term"
    ),
    "takes no mask": "attends without a causal mask",
    "attends twice": (
        "calls attention more than once in one pass of 'model.layers.0.self_attn', and Octavo keeps one set of keys "
        "and values for each pass of a layer"
    ),
    "has a convolution": (
        "mixes tokens outside of attention (in 'model.layers.0.mlp.conv', a convolution): cut into steps it computes "
        "other logits, because between steps Octavo keeps keys and values and no other state"
    ),
    "shifts tokens": (
        "mixes tokens outside of attention: cut into steps it computes other logits, because between steps Octavo "
        "keeps keys and values and no other state"
    ),
    "ignores positions": (
        "counts positions from the start of what it is given and ignores position_ids, so that a request cannot go on "
        "where its last step ended"
    ),
    "follows the longest": (
        "lets the requests of one step influence each other, as experts with a limited capacity do, or rope "
        "frequencies that follow the longest sequence"
    ),
    "looks at ids again": (
        "computes other logits when Octavo's attention takes the place of its own: something is added to its scores "
        "that does not reach the attention function, or its logits are made of more than hidden rows"
    ),
}


@pytest.mark.parametrize("oddity", ODDITIES)
def test_a_model_that_would_compute_something_else_is_refused_with_the_reason(oddity, odd_folder):
    with pytest.raises(UnsupportedModelError) as refusal:
        load(odd_folder(oddity))
    assert str(refusal.value) == f"OddForCausalLM {ODDITIES[oddity]}.{OTHER_WAY}"


def test_a_factor_that_follows_another_count_than_position_ids_is_refused(tmp_path):
    import transformers

    # Llama 4 asks transformers' cache for the position that its temperature depends on, far into a sequence.
    config = transformers.Llama4TextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=2,
        head_dim=16, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, max_position_embeddings=256,
        no_rope_layers=[1, 0], floor_scale=100, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        transformers.Llama4ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as refusal:
        load(tmp_path)
    assert str(refusal.value) == (
        "Llama4ForCausalLM takes positions from something else than position_ids, such as the length of transformers' "
        "own cache: at position 254 it computes something else with a cache than without." + OTHER_WAY
    )
