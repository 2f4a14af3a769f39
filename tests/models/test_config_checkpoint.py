"""A model of which only the config is here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from octavo.errors import CheckpointError, ModelNotFoundError
from octavo.models.checkpoint import open_checkpoint, open_config
from octavo.models.gguf_checkpoint import GGUFCheckpoint
from octavo.models.safetensors_checkpoint import SafetensorsCheckpoint

CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}


def write_config(path: Path, **config: Any) -> Path:
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("place", ["config.json", "renamed.json", ""])
def test_a_config_is_opened_by_its_path_or_its_folders(tmp_path: Path, place: str) -> None:
    write_config(tmp_path / (place or "config.json"), **CONFIG)
    checkpoint = open_config(str(tmp_path / place))
    assert checkpoint.config == CONFIG
    assert checkpoint.dtype == "bfloat16"


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_dtype_is_the_one_that_the_config_gives(tmp_path: Path, key: str) -> None:
    path = write_config(tmp_path / "config.json", **{key: "torch.float16"})
    assert open_config(str(path)).dtype == "float16"


def test_without_weights_a_dtype_that_is_not_given_has_to_be_set(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.json", model_type="llama")
    with pytest.raises(CheckpointError) as caught:
        _ = open_config(str(path)).dtype
    assert str(caught.value) == (
        f"{path} gives no dtype, and there are no weights beside it that would tell. Set dtype, such as "
        "dtype='bfloat16'."
    )


def test_a_dtype_that_no_weights_are_computed_in_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.json", torch_dtype="int4")
    with pytest.raises(CheckpointError, match=r"config\.json gives 'int4' as the dtype; one of float64, float32"):
        _ = open_config(str(path)).dtype


def test_nothing_else_is_in_a_config(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.json", **CONFIG)
    checkpoint = open_config(str(path))
    for ask in (
        lambda: checkpoint.eos_token_ids,
        checkpoint.tensor_names,
        lambda: checkpoint.tensor("lm_head.weight"),
        checkpoint.tokenizer,
    ):
        with pytest.raises(CheckpointError) as caught:
            ask()
        assert str(caught.value) == (
            f"{path} is a config alone; a model runs from a folder that has its weights and tokenizer as well."
        )


def test_whoever_wants_to_run_a_model_is_told_that_a_config_is_not_enough(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.json", **CONFIG)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(path))
    assert str(caught.value) == (
        f"{path} holds a config at most, and no weights. Give the folder that has both; `octavo plan` takes a config "
        "alone."
    )
    with pytest.raises(CheckpointError, match=r"holds no model: neither \.safetensors files beside its config\.json"):
        open_checkpoint(str(tmp_path))


# -- where there are weights ------------------------------------------------------------------------------------


def test_weights_are_not_looked_at_where_the_config_gives_the_dtype(tmp_path: Path) -> None:
    write_config(tmp_path / "config.json", **CONFIG)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert open_config(str(tmp_path)).dtype == "bfloat16"


def test_the_weights_say_the_dtype_where_the_config_does_not(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    write_config(folder / "config.json", **{k: v for k, v in config.items() if not k.endswith("dtype")})
    checkpoint = open_config(str(folder))
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert checkpoint.dtype == "float32"


def test_a_gguf_file_is_its_own_config(demo_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(demo_gguf)
    write_config(tmp_path / "config.json", **CONFIG)
    for model in (None, str(demo_gguf), str(tmp_path)):
        assert isinstance(open_config(model), GGUFCheckpoint)


@pytest.mark.parametrize("name", ["nowhere/config.json", "no where", ""])
def test_what_is_not_there_is_refused_and_not_looked_for_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: pytest.fail("looked up"))
    with pytest.raises(ModelNotFoundError):
        open_config(name)


# -- from the hub -----------------------------------------------------------------------------------------------


def test_of_a_model_on_the_hub_the_config_alone_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetched(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    write_config(tmp_path / "config.json", **CONFIG)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert open_config("org/name").config == CONFIG
    assert (asked["name"], asked["allow_patterns"]) == ("org/name", ["config.json"])


def test_a_model_on_the_hub_without_a_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        open_config("org/name")
    assert str(caught.value) == (
        "The model 'org/name' on the Hugging Face hub has no config.json, which says what it is made of. Give the path "
        "of a .gguf file of it."
    )
