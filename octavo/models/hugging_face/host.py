"""What Octavo asks of transformers: a config from a mapping, a model without weights, a model with them.

transformers is the host of these models. It keeps some settings for a whole process, so what touches them runs one
thread at a time and puts them back.
"""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging as host_logging

from octavo.core.interfaces.model import Checkpoint
from octavo.errors import CheckpointError, NotEnoughMemoryError, OctavoError, UnsupportedModelError
from octavo.models.config_values import QUANTISATION_KEYS, quantises_weights
from octavo.models.kv_scales import is_kv_cache_name
from octavo.models.unserved import refuse_unserved

# Keys of a config that would choose code to run, or where weights come from; and outputs that nothing here reads.
_KEYS_TO_DROP = re.compile(
    r"auto_map|custom_pipelines|_?(attn|experts)_implementation(_\w+)?|fusion_config|kernel_config|distributed_config|"
    r"transformers_weights|_?name_or_path|_commit_hash|output_(attentions|hidden_states|router_logits)|(use_)?return_dict"
)
# Where families that lack `max_position_embeddings` say how long a sequence may be.
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
    "max_target_positions",
)
_ROPE_TABLE = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention)\.(bias|masked_bias)$")

_process_settings = threading.RLock()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let transformers build or load something without a trace: random numbers, logs and progress bars stay as were."""
    with _process_settings, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verbosity, shows_progress = host_logging.get_verbosity(), host_logging.is_progress_bar_enabled()
        # Above every level: what goes wrong is raised, in words of our own.
        host_logging.set_verbosity(host_logging.CRITICAL + 1)
        if shows_progress:
            host_logging.disable_progress_bar()
        try:
            yield
        finally:
            host_logging.set_verbosity(verbosity)
            if shows_progress:
                host_logging.enable_progress_bar()


def architecture(config: Mapping[str, Any]) -> str:
    """Return what to call a config's model in a message."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, (list, tuple)) and named else f"model_type {config.get('model_type')!r}"


def host_config(config: Mapping[str, Any]) -> Any:
    """Return the mapping as a config object of transformers. Code beside the config is never run.

    Raises:
        UnsupportedModelError: transformers does not know the model, or not as one that continues text.
    """
    name, model_type = architecture(config), config.get("model_type")
    refuse_unserved(name, config)
    known = transformers.CONFIG_MAPPING
    if not isinstance(model_type, str) or model_type not in known:
        code = " The code in its folder is not run." if config.get("auto_map") else ""
        typed = f"model_type {model_type!r}"
        raise UnsupportedModelError(
            f"{name if name == typed else f'{name} ({typed})'} is known neither to Octavo nor to transformers "
            f"{transformers.__version__}.{code} Install a newer transformers if that knows it, or a package that "
            "registers a model for it, and name it in model_impl."
        )
    for key in QUANTISATION_KEYS:
        if config.get(key) and quantises_weights(config[key]):
            raise UnsupportedModelError(
                f"{name} has quantised weights ({key}), which are not run through transformers. Use a checkpoint whose "
                "weights are not quantised, or a GGUF file."
            )
    try:
        with undisturbed():
            described = {key: value for key, value in config.items() if key not in QUANTISATION_KEYS}
            converted = known[model_type].from_dict(_without_dropped_keys(described))
    except Exception as cause:
        raise UnsupportedModelError(_cannot_build(name, cause)) from cause
    # A config.json leaves out what is as always in its family, and older ones say it in other words.
    refuse_unserved(name, converted.to_dict())
    if type(converted) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{name}: transformers has no model of the type {model_type!r} that continues text (no causal language "
            "model), so there is nothing to generate with. Use a decoder-only language model."
        )
    return converted


def build_without_weights(config: Any, dtype: str, implementation: str) -> Any:
    """Return the config's model on the meta device: its modules and shapes, and no numbers.

    Args:
        config: What `host_config` returned; it is not changed.
        implementation: Name of the attention function to use.

    Raises:
        UnsupportedModelError: transformers cannot build it.
    """
    name = architecture(config.to_dict())
    try:
        model = _build_on_meta(config, dtype, implementation)
    except Exception as cause:
        if _builds(config, dtype):
            raise UnsupportedModelError(
                f"{name} computes its attention itself, or takes it from a list of its own ({summary(cause)}), so "
                "Octavo cannot page its keys and values. It cannot be served through transformers; use another model, "
                "or install a package that registers a model for it, and name it in model_impl."
            ) from cause
        raise UnsupportedModelError(_cannot_build(name, cause)) from cause
    return freeze(model)


def load(checkpoint: Checkpoint, config: Any, dtype: str, device: str, implementation: str) -> Any:
    """Return the config's model with the checkpoint's weights.

    transformers renames, splits, stacks and ties tensors as the family needs it. It takes them from the checkpoint one
    after the other, each already in `dtype`: there are never two copies of all weights.

    Raises:
        CheckpointError: A tensor is missing, of another shape, or unreadable.
        UnsupportedModelError: A tensor has no place in the model.
        NotEnoughMemoryError: The device has no room for the weights.
    """
    name = architecture(config.to_dict())
    sources = {tensor_name: _LazyTensor(checkpoint, tensor_name) for tensor_name in checkpoint.tensor_names()}
    model_class = _model_class(config)
    try:
        with undisturbed():
            model, report = model_class.from_pretrained(
                None,
                config=config,
                state_dict=sources,
                dtype=getattr(torch, dtype),
                attn_implementation=implementation,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
            )
    except OctavoError:
        raise
    except Exception as cause:
        failed = next((source.error for source in sources.values() if source.error is not None), None)
        if failed is not None:
            raise failed from cause
        raise CheckpointError(
            f"transformers cannot load the weights of {name}: {summary(cause)}. The weights and the config do not "
            "belong together, or transformers is too old for them."
        ) from cause
    unexpected = [key for key in report["unexpected_keys"] if not _is_leftover(checkpoint, key)]
    _refuse_misfits(name, dict(report) | {"unexpected_keys": unexpected}, _forgiven(model))
    try:
        return freeze(model).to(device)
    except (RuntimeError, MemoryError) as cause:
        raise NotEnoughMemoryError(
            f"There is no room on {device} for the weights of {name} in {dtype}. Choose a smaller dtype or model, or "
            "another device.",
            max_model_len_that_fits=0,
        ) from cause


def freeze(model: Any) -> Any:
    """Make a model ready to infer: dropout off, no gradients. Returns it."""
    return model.eval().requires_grad_(False)


def use_implementation(model: nn.Module, implementation: str) -> None:
    """Switch the attention function of a model, in every config that one of its modules holds."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, transformers.PretrainedConfig):
                value._attn_implementation = implementation


def use_experts(model: nn.Module, implementation: str) -> None:
    """Switch how a mixture of experts is computed, in every config that one of the model's modules holds."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, transformers.PretrainedConfig):
                value._experts_implementation = implementation


def max_position(config: Any) -> int | None:
    """Return how many tokens the longest sequence may have; None when the config does not say.

    Rope frequencies that change with the length of a sequence would turn keys that are already stored, so such a model
    serves the length up to which they are constant.
    """
    text = config.get_text_config(decoder=True)
    lengths = _lengths(getattr(text, key, None) for key in _LENGTH_KEYS)
    constant = _lengths(
        rope.get("original_max_position_embeddings")
        for rope in _rope_settings(getattr(text, "rope_parameters", None))
        if rope.get("rope_type", rope.get("type")) == "longrope"
    )
    return min([lengths[0], *constant]) if lengths else None


def summary(cause: BaseException) -> str:
    """Return an exception as one line without an end."""
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0].rstrip('.:')}" if lines else type(cause).__name__


class _LazyTensor:
    """A checkpoint's tensor. It is read when transformers asks for its numbers, with `[...]` as of safetensors."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self.error: OctavoError | None = None

    def __getitem__(self, index: Any) -> Tensor:
        try:
            return self._checkpoint.tensor(self._name)[index]
        except OctavoError as error:
            # transformers wraps what its loading threads raise.
            self.error = error
            raise


def _without_dropped_keys(value: Any) -> Any:
    """Return a deep copy of a config's mapping that holds only what describes the model."""
    if isinstance(value, Mapping):
        # As transformers writes numbers that JSON has no form for.
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {
            key: _without_dropped_keys(item)
            for key, item in value.items()
            if not (isinstance(key, str) and _KEYS_TO_DROP.fullmatch(key))
        }
    if isinstance(value, (list, tuple)):
        return [_without_dropped_keys(item) for item in value]
    return value


def _build_on_meta(config: Any, dtype: str, implementation: str) -> Any:
    with undisturbed(), torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=getattr(torch, dtype),
            attn_implementation=implementation,
            trust_remote_code=False,
        )


def _builds(config: Any, dtype: str) -> bool:
    """Return whether the config's model can be built with transformers' own attention."""
    try:
        _build_on_meta(config, dtype, "eager")
    except Exception:
        return False
    return True


def _model_class(config: Any) -> Any:
    """Return the class that transformers' AutoModelForCausalLM takes for a config."""
    found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(found, (list, tuple)):
        return found
    named = {candidate.__name__: candidate for candidate in found}
    return next((named[name] for name in config.architectures or () if name in named), found[0])


def _forgiven(model: Any) -> set[str]:
    """Return the names that need no tensor of their own: buffers, and parameters that share another one's memory."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    first_name: dict[int, str] = {}
    shared = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first_name.setdefault(id(parameter), name) != name
    }
    return buffers | shared


def _is_leftover(checkpoint: Checkpoint, key: str) -> bool:
    """Return whether a tensor without a place is no weight: a table that old checkpoints carry along and that is
    computed anew, or a scale for a quantised KV cache.
    """
    if _ROPE_TABLE.search(key) or is_kv_cache_name(key):
        return True
    if not _CAUSAL_MASK.search(key):
        return False
    # By the name it could be a weight as well; a mask is [1, 1, length, length], and what it masks with a number. The
    # key may have a prefix that the checkpoint's name has not.
    names = [name for name in checkpoint.tensor_names() if key == name or key.endswith(f".{name}")]
    return all(checkpoint.tensor(name).shape[:2] in ((), (1, 1)) for name in names)


def _refuse_misfits(name: str, report: Mapping[str, Any], forgiven: set[str]) -> None:
    missing = sorted(set(report["missing_keys"]) - forgiven)
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks {len(missing)} tensors that {name} needs, {missing[0]!r} the first. The weights and "
            "the config do not belong together, or the checkpoint is of another head than a language model's."
        )
    if mismatched := sorted(report["mismatched_keys"], key=str):
        tensor_name, found, wanted = mismatched[0]
        raise CheckpointError(
            f"Tensor {tensor_name!r} is of shape {list(found)}; the config of {name} asks for {list(wanted)} "
            f"({len(mismatched)} tensors in all). The weights and the config do not belong together."
        )
    if unexpected := sorted(report["unexpected_keys"]):
        raise UnsupportedModelError(
            f"The checkpoint holds {len(unexpected)} tensors that {name} has no place for in transformers "
            f"{transformers.__version__}, {unexpected[0]!r} the first. The model is a variant that is not computed "
            "there, or the config is wrong."
        )


def _rope_settings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a config's rope settings: it has one for all layers, or one for each kind of layer."""
    if isinstance(value, Mapping):
        yield value
        for item in value.values():
            yield from _rope_settings(item)


def _lengths(values: Iterable[Any]) -> list[int]:
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0]


def _cannot_build(name: str, cause: BaseException) -> str:
    return (
        f"transformers {transformers.__version__} cannot build {name} from its config: {summary(cause)}. The config is "
        "wrong, or made for another version of transformers."
    )
