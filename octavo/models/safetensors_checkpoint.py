"""A folder with config.json and .safetensors files as a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.core.interfaces.model import Tokenizer

_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# As safetensors names dtypes -> as torch does.
_TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsCheckpoint:
    """A model's folder in Hugging Face's layout. Code in the folder is never run, and `auto_map` never followed.

    Raises:
        CheckpointError: A file is missing, truncated or not what its name says. All shards are opened here, so a
            shard that is missing or cut short shows before any weight is loaded.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._config = read_json_object(folder / "config.json")
        self._shards: dict[Path, Any] = {}
        self._places = self._find_tensors()

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def dtype(self) -> str:
        """What config.json says as `dtype` or `torch_dtype`; where it says nothing, the dtype of the first weight."""
        return stated_dtype(self._config, self.path / "config.json") or self._first_dtype()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """From generation_config.json, else from config.json or the text_config in it."""
        generation_config = self.path / "generation_config.json"
        text_config = self._config.get("text_config")
        sources = [self._config, *([text_config] if isinstance(text_config, dict) else [])]
        if generation_config.is_file():
            sources.insert(0, read_json_object(generation_config))
        stated: Any = next((s["eos_token_id"] for s in sources if s.get("eos_token_id") is not None), [])
        token_ids = stated if isinstance(stated, list) else [stated]
        if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
            raise CheckpointError(f"{self.path} gives {stated!r} as eos_token_id; it has to be one token id or a list.")
        return frozenset(token_ids)

    def tensor_names(self) -> Iterable[str]:
        return self._places.keys()

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in the dtype of the file; safe to call from several threads."""
        shard = self._places.get(name)
        if shard is None:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}. Its .safetensors files hold {len(self._places)} tensors; the "
                "model that config.json describes needs this one."
            )
        try:
            tensor: Tensor = self._shards[shard].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"Tensor {name!r} in {shard} cannot be read: {error}. Fetch the file again."
            ) from error
        return tensor

    def tokenizer(self) -> Tokenizer:
        from octavo.models.tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(self.path)

    def _first_dtype(self) -> str:
        for name, shard in self._places.items():
            dtype = _TORCH_DTYPES.get(self._shards[shard].get_slice(name).get_dtype())
            if dtype is not None:
                return dtype
        return "float32"

    def _find_tensors(self) -> dict[str, Path]:
        """Return the file that each tensor is in."""
        if (self.path / _SINGLE_FILE).is_file():
            return self._open_shard(self.path / _SINGLE_FILE)
        if (self.path / _INDEX).is_file():
            return self._open_indexed_shards()
        files = sorted(self.path.glob("*.safetensors"))
        if len(files) == 1:
            return self._open_shard(files[0])
        raise CheckpointError(
            f"{self.path} holds {len(files)} .safetensors files and neither {_SINGLE_FILE} nor {_INDEX}, which says "
            "what is in which. Fetch the folder again."
        )

    def _open_indexed_shards(self) -> dict[str, Path]:
        index_path = self.path / _INDEX
        weight_map = read_json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{index_path} has no 'weight_map', which says what is in which file. Fetch it again."
            )
        places: dict[str, Path] = {}
        for file_name in dict.fromkeys(weight_map.values()):
            # An index may name files beside it and nothing else.
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(f"{index_path} names {file_name!r} as a shard, which is not a file name.")
            places |= self._open_shard(self.path / file_name)
        missing = [name for name in weight_map if places.get(name) != self.path / weight_map[name]]
        if missing:
            raise CheckpointError(
                f"{index_path} says that {missing[0]!r} is in {weight_map[missing[0]]}, and it is not "
                f"({len(missing)} tensors in all). Fetch the folder again."
            )
        return {name: places[name] for name in weight_map}

    def _open_shard(self, path: Path) -> dict[str, Path]:
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing, and {_INDEX} says that weights are in it. Fetch the folder again."
            )
        try:
            self._shards[path] = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is truncated or not a safetensors file: {error}. Fetch it again.") from error
        return dict.fromkeys(self._shards[path].keys(), path)


def stated_dtype(config: Mapping[str, Any], path: Path) -> str | None:
    """Return the dtype that a config.json at `path` gives, as torch names it; None where it gives none.

    Raises:
        CheckpointError: It is none that weights are computed in.
    """
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated is None:
        return None
    name = stated.removeprefix("torch.") if isinstance(stated, str) else stated
    if name not in _TORCH_DTYPES.values():
        raise CheckpointError(
            f"{path} gives {stated!r} as the dtype; one of {', '.join(_TORCH_DTYPES.values())} is expected."
        )
    return str(name)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that holds an object.

    Raises:
        CheckpointError: There is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. A model's folder needs it; fetch the folder again.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}. Fetch it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__} where an object is expected.")
    return content
