"""The copy of a tokenizer has the recorded hashes; otherwise copying raises."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from training.contract.errors import DataError, ModelError
from training.contract.identity.tokenizer_files import class_fields, copy_tokenizer, tokenizer_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md", "additional_chat_templates/rag.jinja"):
        (folder / name).write_text(name)
    config = {"model_type": "olmo2", "hidden_size": 16, "transformers_version": "5.0.0", "tokenizer_class": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {name: sha256(path.read_bytes()).hexdigest() for name, path in tokenizer_files(folder).items()}


def test_copy_tokenizer_copies_tokenizer_files_and_class_fields_only(folder: Path, tmp_path: Path):
    fields = {"model_type": "olmo2", "transformers_version": "5.0.0"}
    assert class_fields(folder) == fields
    copy_tokenizer(folder, tmp_path / "copy", hashes(folder), fields)
    copied = {
        path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*") if path.is_file()
    }
    assert copied == {"tokenizer.json", "tokenizer_config.json", "additional_chat_templates/rag.jinja", "config.json"}
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == fields


def test_copy_tokenizer_of_changed_files_raises_with_names(folder: Path, tmp_path: Path):
    recorded, fields = hashes(folder), class_fields(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "transformers_version": "5.0.0"}))
    with pytest.raises(DataError, match=r"config\.json .*olmo2.*llama.*\[file-changed\]"):
        copy_tokenizer(folder, tmp_path / "1", recorded, fields)
    (folder / "tokenizer.json").write_text("another")
    old, new = (digests["tokenizer.json"][:12] for digests in (recorded, hashes(folder)))
    with pytest.raises(DataError, match=rf"tokenizer\.json .*{old} .*{new}.*\[file-changed\]"):
        copy_tokenizer(folder, tmp_path / "2", recorded, fields)
    (folder / "vocab.txt").write_text("another")
    with pytest.raises(DataError, match=r"vocab\.txt .*\[file-changed\]"):
        copy_tokenizer(folder, tmp_path / "3", recorded, fields)


@pytest.mark.parametrize(("text", "value"), [("{", "Expecting property name"), ("[]", "JSON list")])
def test_class_fields_of_config_without_object_raises(folder: Path, text: str, value: str):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"config\.json .*{value}.*\[bad-json\]"):
        class_fields(folder)


def test_class_fields_without_a_config_are_empty(tmp_path: Path):
    assert class_fields(tmp_path) == {}
