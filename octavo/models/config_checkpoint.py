"""A config.json without weights as a checkpoint: enough to say what a model needs, and not to run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.errors import CheckpointError
from octavo.models.safetensors_checkpoint import SafetensorsCheckpoint, read_json_object, stated_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.core.interfaces.model import Tokenizer


class ConfigCheckpoint:
    """A model of which only the config is here.

    Raises:
        CheckpointError: The file is missing, or holds something else than a JSON object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config = read_json_object(path)

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def dtype(self) -> str:
        """What the config says as `dtype` or `torch_dtype`. CheckpointError where it says nothing."""
        dtype = stated_dtype(self._config, self.path)
        if dtype is None:
            raise CheckpointError(
                f"{self.path} gives no dtype, and there are no weights beside it that would tell. Set dtype, such as "
                "dtype='bfloat16'."
            )
        return dtype

    @property
    def eos_token_ids(self) -> frozenset[int]:
        self._refuse()

    def tensor_names(self) -> Iterable[str]:
        """As `tensor`."""
        return self._weights().tensor_names()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the weights that lie beside the config, if there are any."""
        return self._weights().tensor(name)

    def tokenizer(self) -> Tokenizer:
        self._refuse()

    @cached_property
    def has_weights(self) -> bool:
        """Whether weights lie beside the config, readable or not. One of another name need not belong to them."""
        return self.path.name == "config.json" and any(self.path.parent.glob("*.safetensors"))

    @cached_property
    def _beside(self) -> SafetensorsCheckpoint | None:
        return SafetensorsCheckpoint(self.path.parent) if self.has_weights else None

    def _weights(self) -> SafetensorsCheckpoint:
        if self._beside is None:
            self._refuse()
        return self._beside

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            f"{self.path} is a config alone; a model runs from a folder that has its weights and tokenizer as well."
        )
