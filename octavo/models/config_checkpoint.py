"""A config.json without weights as a checkpoint: enough to say what a model needs, and not to run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.errors import CheckpointError
from octavo.models.safetensors_checkpoint import read_json_object, stated_dtype

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
        self._refuse()

    def tensor(self, name: str) -> Tensor:
        self._refuse()

    def tokenizer(self) -> Tokenizer:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            f"{self.path} is a config alone; a model runs from a folder that has its weights and tokenizer as well."
        )
