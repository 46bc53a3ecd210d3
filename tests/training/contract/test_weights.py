"""What is part of a model's identity and what is not, one ingredient a test."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from training.contract.errors import ModelError
from training.contract.weights import weight_files, weights_fingerprint, weights_identity

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e4},
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"w": np.arange(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def identity(folder: Path) -> str:
    return weights_fingerprint(weights_identity(folder))


def configure(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 9},
        {"rms_norm_eps": 1e-6},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"tie_word_embeddings": False},
        {"attn_logit_softcapping": 50.0},
        {"model_type": "qwen2"},
    ],
    ids=str,
)
def test_another_function_another_identity(model, change):
    before = identity(model)
    configure(model, **change)
    assert identity(model) != before


@pytest.mark.parametrize(
    "change",
    [
        {"_name_or_path": "somewhere"},
        {"transformers_version": "9.9"},
        {"torch_dtype": "bfloat16"},
        {"dtype": "float32"},
        {"use_cache": False},
    ],
    ids=str,
)
def test_bookkeeping_is_no_part_of_it(model, change):
    before = identity(model)
    configure(model, **change)
    assert identity(model) == before


def test_another_number_in_a_tensor_another_identity(model):
    before = identity(model)
    save_file({"w": np.array([0, 1, 2, 3.0000002], dtype=np.float32)}, model / "model.safetensors")
    assert identity(model) != before


def test_the_folder_and_the_names_of_the_files_are_no_part_of_it_but_their_order_is(model, tmp_path_factory):
    save_file({"v": np.ones(2, np.float32)}, model / "model2.safetensors")
    before = identity(model)
    (model / "model.safetensors").rename(model / "a.safetensors")
    assert identity(model) == before
    (model / "a.safetensors").rename(model / "z.safetensors")
    assert identity(model) != before
    (model / "z.safetensors").rename(model / "model.safetensors")
    moved = model.rename(tmp_path_factory.mktemp("elsewhere") / "model")
    assert identity(moved) == before


def test_a_file_more_another_identity(model):
    before = identity(model)
    save_file({"v": np.ones(2, np.float32)}, model / "model2.safetensors")
    assert identity(model) != before


def test_files_of_other_kinds_do_not_count(model):
    before = identity(model)
    (model / "README.md").write_text("a model")
    (model / "generation_config.json").write_text("{}")
    assert identity(model) == before


def test_a_folder_with_bin_weights_only_is_refused_and_says_what_to_do(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin; expected \*\.safetensors .*save_pretrained"):
        weight_files(model)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        weight_files(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [None, b"{", b"\xff", b"[]"])
def test_a_config_that_cannot_be_read_is_refused_by_name(model, content):
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        identity(model)
