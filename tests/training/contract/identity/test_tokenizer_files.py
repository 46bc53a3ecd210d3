"""A tokenizer is copied as it was hashed, or refused."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from training.contract.errors import DataError, ModelError
from training.contract.identity.tokenizer_files import class_fields, copy_tokenizer, tokenizer_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md", "additional_chat_templates/rag.jinja"):
        (folder / name).write_text(name)
    config = {"model_type": "olmo2", "hidden_size": 16, "transformers_version": "5.0.0", "tokenizer_class": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {name: sha256(path.read_bytes()).hexdigest() for name, path in tokenizer_files(folder).items()}


def test_copy_has_the_files_that_count_and_the_fields_that_pick_the_class(folder: Path, tmp_path: Path):
    fields = {"model_type": "olmo2", "transformers_version": "5.0.0"}
    assert class_fields(folder) == fields
    copy_tokenizer(folder, tmp_path / "copy", hashes(folder), fields)
    copied = {
        path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*") if path.is_file()
    }
    assert copied == {"tokenizer.json", "tokenizer_config.json", "additional_chat_templates/rag.jinja", "config.json"}
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == fields


def test_copy_of_files_that_changed_since_is_refused_by_name(folder: Path, tmp_path: Path):
    known, fields = hashes(folder), class_fields(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "transformers_version": "5.0.0"}))
    with pytest.raises(DataError, match=r"config\.json changed while it was read: .*olmo2.* became .*llama"):
        copy_tokenizer(folder, tmp_path / "1", known, fields)
    (folder / "tokenizer.json").write_text("another")
    with pytest.raises(DataError, match=r"tokenizer\.json changed while it was read: it was \w{12} and is \w{12}"):
        copy_tokenizer(folder, tmp_path / "2", known, fields)
    (folder / "vocab.txt").write_text("another")
    with pytest.raises(DataError, match=r"changed while it was read: vocab\.txt came or went"):
        copy_tokenizer(folder, tmp_path / "3", known, fields)


@pytest.mark.parametrize(("text", "told"), [("{", "cannot be read"), ("[]", "holds a JSON list; expected an object")])
def test_fields_of_a_config_that_is_none_are_refused(folder: Path, text: str, told: str):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=told):
        class_fields(folder)


def test_fields_without_a_config_are_none(tmp_path: Path):
    assert class_fields(tmp_path) == {}
