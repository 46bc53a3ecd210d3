"""The identity of a model, one ingredient per test. The safetensors library writes the files."""

import errno
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from training.contract.errors import ModelError
from training.contract.identity.hash_cache import HashCache
from training.contract.identity.model_identity import (
    ModelIdentity,
    count_parameters,
    hash_tensors,
    weight_files,
    weights_identity,
)

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
    return weights_identity(folder).fingerprint


def configure(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


@pytest.mark.parametrize(
    "named", [{"transformers_weights": "other"}, {"text_config": {"transformers_weights": "other"}}]
)
def test_weights_identity_with_another_weights_file_in_config_raises(model, named):
    """transformers would load the file of `transformers_weights` (modeling_utils.py)."""
    configure(model, **named)
    with pytest.raises(ModelError, match=r"config\.json .*transformers_weights.*\[other-weights-file\]"):
        weights_identity(model)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 9},
        {"rms_norm_eps": 1e-6},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"tie_word_embeddings": False},
        {"attn_logit_softcapping": 50.0},
        {"model_type": "qwen2"},
        {"final_logit_softcapping": 30.0},
        {"sliding_window": None},
        {"text_config": {"rope_theta": 1e6}},
    ],
    ids=str,
)
def test_identity_depends_on_config_fields_of_the_function(model, change):
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
        {"_name_or_path": "a", "transformers_version": "4.0", "dtype": "float16", "use_cache": True},
    ],
    ids=str,
)
def test_identity_ignores_bookkeeping_fields(model, change):
    before = identity(model)
    configure(model, **change)
    assert identity(model) == before


def test_identity_ignores_bookkeeping_fields_of_an_inner_model(model):
    configure(model, text_config={"hidden_size": 8, "dtype": "float32", "transformers_version": "5.0"})
    before = identity(model)
    configure(model, text_config={"hidden_size": 8, "dtype": "bfloat16"})
    assert identity(model) == before
    configure(model, text_config={"hidden_size": 9, "dtype": "bfloat16"})
    assert identity(model) != before


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"b": (3, 5), "a": (7,), "scalar": (), "none": (0, 4), "big": (700, 800)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def reshard(folder: Path, parts: list[list[str]]) -> None:
    """Write the weights into files with these tensors and an index, like `save_pretrained`."""
    content = tensors()
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        save_file({tensor: content[tensor] for tensor in part}, folder / name, metadata={"format": "pt"})
    index = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def test_identity_is_the_same_after_saving_again_or_in_other_shards(model):
    save_file(tensors(), model / "model.safetensors")
    before = identity(model)
    save_file(dict(reversed(tensors().items())), model / "model.safetensors", metadata={"format": "pt", "by": "me"})
    assert identity(model) == before
    for parts in (
        [["a", "b", "big", "none", "scalar"]],
        [["big"], ["scalar", "a"], ["none", "b"]],
        [["a", "b", "big"], ["none", "scalar"]],
    ):
        reshard(model, parts)
        assert identity(model) == before
    moved = model.rename(model.with_name("elsewhere"))
    assert identity(moved) == before


def test_identity_depends_on_every_byte_of_the_tensors(model):
    path = model / "model.safetensors"
    save_file({"w": np.arange(4, dtype=np.float32), "v": np.arange(3, dtype=np.uint8)}, path)
    content = path.read_bytes()
    seen = {identity(model)}
    for byte in range(len(content) - 19, len(content)):
        path.write_bytes(content[:byte] + bytes([content[byte] ^ 1]) + content[byte + 1 :])
        seen.add(identity(model))
    assert len(seen) == 20


@pytest.mark.parametrize(
    "other",
    [
        {"w": np.zeros(4, np.float16)},
        {"w": np.zeros((2, 2), np.float32)},
        {"v": np.zeros(4, np.float32)},
        {"w": np.zeros(4, np.int32)},
        {"w": np.zeros(4, np.float32), "v": np.zeros(0, np.float32)},
        {"w": np.zeros(5, np.float32)},
    ],
    ids=lambda other: ",".join(f"{name}:{a.dtype}{list(a.shape)}" for name, a in other.items()),
)
def test_identity_depends_on_names_dtypes_shapes_and_tensors(model, other):
    save_file({"w": np.zeros(4, np.float32)}, model / "model.safetensors")
    before = identity(model)
    save_file(other, model / "model.safetensors")
    assert identity(model) != before


def test_identity_differs_after_swapping_two_tensors(model):
    one, two = np.ones(2, np.float32), np.zeros(2, np.float32)
    save_file({"q": one, "k": two}, model / "model.safetensors")
    before = identity(model)
    save_file({"q": two, "k": one}, model / "model.safetensors")
    assert identity(model) != before


def test_hash_tensors_is_sha256_of_description_and_bytes(model):
    """Computed from the array alone. So every byte is read once and in order, also across blocks."""
    save_file(tensors(), model / "model.safetensors")
    (table,) = hash_tensors([model / "model.safetensors"])
    for name, array in tensors().items():
        described = json.dumps([name, "F32", list(array.shape)], separators=(",", ":")).encode()
        assert table["tensors"][name] == hashlib.sha256(described + array.tobytes()).hexdigest()
    assert table["bytes"] == sum(array.nbytes for array in tensors().values())


def test_weight_files_are_the_files_transformers_loads(model):
    """Mistral's repositories hold a second copy, `consolidated.safetensors`, which is ignored."""
    reshard(model, [["a", "b"], ["big", "none", "scalar"]])
    before = identity(model)
    save_file({"a": np.ones(2, np.float32)}, model / "consolidated.safetensors")
    assert identity(model) == before
    save_file({"a": np.ones(2, np.float32)}, model / "model.safetensors")
    assert [file.name for file in weight_files(model)] == ["model.safetensors"] and identity(model) != before


def test_identity_without_an_index_covers_all_files(model):
    (model / "model.safetensors").rename(model / "a.safetensors")
    before = identity(model)
    save_file({"v": np.ones(2, np.float32)}, model / "b.safetensors")
    assert identity(model) != before
    save_file({"w": np.ones(2, np.float32)}, model / "b.safetensors")
    with pytest.raises(ModelError, match=r" w .*a\.safetensors .*b\.safetensors.*\[duplicate-tensor\]"):
        identity(model)


ELSEWHERE = ["../model.safetensors", "/etc/hostname", "missing.safetensors", ".."]


@pytest.mark.parametrize(
    ("content", "message"),
    [(json.dumps({"weight_map": {"w": name}}), rf"{re.escape(name)}, .*\[missing-weights-file\]") for name in ELSEWHERE]
    + [(content, r"\[bad-json\]") for content in ("", "[]")]
    + [(content, r"\[bad-weight-index\]") for content in ("{}", '{"weight_map": []}')],
)
def test_identity_with_invalid_index_raises(model, content, message):
    (model / "model.safetensors").rename(model / "other.safetensors")
    (model / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=rf"index\.json .*{message}"):
        identity(model)


def framed(header: bytes, body: bytes = bytes(16)) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def entry(begin: int, end: int) -> str:
    return f'{{"dtype":"F32","shape":[2],"data_offsets":[{begin},{end}]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        framed(b"{"),
        framed(f'{{"w":{entry(0, 8)},"v":{entry(4, 12)}}}'.encode()),
        framed(f'{{"w":{entry(0, 8)},"v":{entry(8, 16)}}}'.encode(), bytes(12)),
        framed(f'{{"w":{entry(0, 8)},"w":{entry(0, 8)}}}'.encode(), bytes(8)),
    ],
    ids=["empty", "short", "no JSON", "overlap", "truncated", "a name twice"],
)
def test_identity_of_invalid_safetensors_file_raises_with_name(model, content):
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors .*\[bad-safetensors\]"):
        identity(model)


def test_weights_identity_through_a_dangling_link_raises_with_name(model):
    """A cache with pruned files looks like this."""
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(model / "blobs" / "4f2a")
    with pytest.raises(ModelError, match=r"model\.safetensors .*No such file or directory; .*\[unreadable-file\]"):
        weights_identity(model)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_weights_identity_without_permission_raises_with_name(model, monkeypatch, name):
    """safetensors would report the file as missing. The error is simulated, because root may read everything."""
    opens = open

    def refuse(opened: Any, *rest: Any, **options: Any) -> Any:
        if Path(opened).name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(opened))
        return opens(opened, *rest, **options)

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=rf"{re.escape(name)} .*Permission denied; .*\[unreadable-file\]"):
        weights_identity(model)


def test_weights_identity_with_cache_is_the_same_after_every_edit(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "hashes.json"

    def cached() -> ModelIdentity:
        return weights_identity(model, HashCache(path, settle_seconds=0.1))

    time.sleep(0.2)
    before = weights_identity(model)
    assert cached() == before == cached() and path.is_file()
    configure(model, rms_norm_eps=1e-6)
    assert cached() == weights_identity(model) != before
    save_file({"w": np.arange(1, 5, dtype=np.float32)}, model / "model.safetensors")
    assert cached().weights == weights_identity(model).weights != before.weights


def test_identity_ignores_other_files(model):
    before = identity(model)
    (model / "README.md").write_text("a model")
    (model / "generation_config.json").write_text("{}")
    assert identity(model) == before


def test_weight_files_of_folder_with_bin_weights_raises_with_name(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin; .*\*\.safetensors .*save_pretrained.*\[no-weights\]"):
        weight_files(model)


def test_weight_files_of_missing_folder_raises(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere .*\[no-model-folder\]"):
        weight_files(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [None, b"{", b"\xff", b"[]"])
def test_identity_with_invalid_config_raises_with_name(model, content):
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json .*\[(unreadable-file|bad-json)\]"):
        identity(model)


def test_weights_identity_without_config_raises_before_reading_weights(model):
    """The tensor is a sparse file of 2 TB: reading it would take a quarter of an hour."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [2 * 10**12], "data_offsets": [0, 2 * 10**12]}}).encode()
    with open(model / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * 10**12)
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json .*No such file.*\[unreadable-file\]"):
        weights_identity(model)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
    ids=["all of it", "its language model"],
)
def test_quantized_weights_raise_with_their_method(model, config):
    """transformers loads them as plain numbers, and saves them quantized again, but without that field in the config."""
    configure(model, **config)
    for read in (weight_files, weights_identity):
        with pytest.raises(ModelError, match=r"\(fp8\).* bfloat16 .*\[quantized-weights\]"):
            read(model)
    configure(model, quantization_config=None)
    assert weight_files(model) == [model / "model.safetensors"]


def test_count_parameters_counts_all_files(model: Path) -> None:
    """4 numbers in one file; then 2 * 3 and 1 in two files of two dtypes."""
    assert count_parameters(model) == 4
    (model / "model.safetensors").unlink()
    save_file({"a": np.zeros((2, 3), np.float16)}, model / "1.safetensors")
    save_file({"b": np.zeros((), np.float32)}, model / "2.safetensors")
    assert count_parameters(model) == 7
    (model / "2.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"2\.safetensors .*\[bad-safetensors\]"):
        count_parameters(model)
