"""What some models keep that nothing of Octavo's serves: how it is known from a config, and what to say.

No model class of Octavo's own keeps such a thing, so one that is told to would compute something else. Through
transformers such models would fail later and less clearly. A package's model may keep what it has a manager for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import UnsupportedModelError

# Kinds that Octavo has a KV-cache manager for, and what people call them.
SERVED = {
    "full_attention": "full attention",
    "sliding_window": "sliding windows",
    "chunked_local": "aligned chunks",
    "mla": "latents (MLA)",
}


@dataclass(frozen=True)
class UnservedKind:
    """Something that layers keep, and that Octavo has no KV-cache manager for.

    Attributes:
        name: What a manager for it would be registered as.
        keeps: What it is, as a sentence has it behind "keeps".
    """

    name: str
    keeps: str


RECURRENT_STATE = UnservedKind("mamba", "a recurrent state, which each token changes as a whole")
CROSS_ATTENTION = UnservedKind("cross_attention", "keys and values of an encoder's output beside those of the text")
SINK_BLOCKS = UnservedKind("sink", "blocks of learned keys and values in front of those of the text")

# All models of these types keep a state. Here are those whose configs do not say it layer by layer, and those that the
# installed transformers may not know. Lower case, without separators: configs and GGUF files spell them differently.
_RECURRENT_TYPES = frozenset(
    {
        "arwkv7",
        "bamba",
        "falconh1",
        "falconmamba",
        "jamba",
        "kimilinear",
        "mamba",
        "mamba2",
        "nemotronh",
        "olmohybrid",
        "plamo2",
        "qwen3next",
        "recurrentgemma",
        "rwkv",
        "rwkv5",
        "rwkv6",
        "rwkv6qwen2",
        "rwkv7",
        "xlstm",
        "zamba",
        "zamba2",
    }
)
_ENCODER_DECODER_TYPES = frozenset({"bart", "mt5", "t5", "umt5", "whisper"})
# Where configs say what each layer is, and the names of layers with a state.
_LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")
_RECURRENT_LAYERS = frozenset(
    {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "mamba2", "recurrent", "rwkv"}
)
# A config of several models holds one for each under such a key.
_TEXT_KEYS = ("text_config", "decoder")
_SINK_KEY = "param_sink_number"


def refuse_unserved(name: str, config: Mapping[str, Any]) -> None:
    """Raise where a model keeps something that nothing of Octavo's serves.

    Args:
        name: What to call the model.
        config: A config.json, or as much as is known of one.

    Raises:
        UnsupportedModelError: It does. The message says what, by what it is known, and the way out.
    """
    for part in _parts(config):
        for kind, sign in _signs(part):
            served = list(SERVED.values())
            raise UnsupportedModelError(
                f"{name} keeps {kind.keeps} ({sign}), and Octavo has no KV-cache manager for the kind {kind.name!r}. "
                f"It has managers for {', '.join(served[:-1])} and {served[-1]}. Use a model that keeps no more than "
                "these, or install a package that registers a model and a manager for such layers, and name the model "
                "in model_impl; docs/plugins/kv_managers.md says how one is written."
            )


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for key in _TEXT_KEYS:
        if isinstance(config.get(key), Mapping):
            yield config[key]


def _signs(config: Mapping[str, Any]) -> Iterator[tuple[UnservedKind, str]]:
    """Yield each thing in a config that tells of such a kind, as a sentence has it in brackets."""
    model_type = str(config.get("model_type", ""))
    known_as = model_type.lower().replace("_", "").replace("-", "")
    if config.get("is_encoder_decoder"):
        yield CROSS_ATTENTION, "is_encoder_decoder is true"
    if known_as in _ENCODER_DECODER_TYPES and config.get("is_encoder_decoder") is None:
        yield CROSS_ATTENTION, f"as every {model_type} does"
    for key in ("add_cross_attention", "cross_attention_layers"):
        if config.get(key):
            yield CROSS_ATTENTION, f"{key} is {config[key]!r}"
    if config.get(_SINK_KEY):
        yield SINK_BLOCKS, f"{_SINK_KEY} is {config[_SINK_KEY]!r}"
    for key in _LAYER_KEYS:
        for layer_kind in _names(config.get(key)):
            if layer_kind in _RECURRENT_LAYERS:
                yield RECURRENT_STATE, f"its {key} have {layer_kind!r}"
    if known_as in _RECURRENT_TYPES:
        yield RECURRENT_STATE, f"as every {model_type} does"


def _names(value: Any) -> Iterable[str]:
    """Return the texts in a list, each once; none for anything else."""
    return dict.fromkeys(item for item in value if isinstance(item, str)) if isinstance(value, (list, tuple)) else ()
