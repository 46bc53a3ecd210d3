"""The chat template that counts, compared with the tokenizer that transformers loads from the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests import factories
from training.contract.errors import TemplateError
from training.contract.identity.chat_template import chat_template

JINJA, ADDITIONAL = "chat_template.jinja", "additional_chat_templates/rag.jinja"
FORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "jinja file": {JINJA: "a\r\nb"},
    "config": {"config": "from the config"},
    "jinja file over config": {JINJA: "from the file", "config": "from the config"},
    "several in the config": {"config": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]},
    "several in the config, no default": {"config": [{"name": "rag", "template": "r"}]},
    "several files": {JINJA: "d", ADDITIONAL: "r"},
    "additional file alone": {ADDITIONAL: "r", "config": "from the config"},
}


def write(folder: Path, form: dict[str, Any]) -> Path:
    factories.word_tokenizer(["<unk>", "a", "b"], unk_token="<unk>").save_pretrained(folder)
    for name in (JINJA, ADDITIONAL):
        if name in form:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(form[name].encode())
    if "config" in form:
        config = folder / "tokenizer_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": form["config"]}))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_chat_template_of_a_folder_is_the_default_one_of_transformers(form: str, tmp_path: Path):
    folder = write(tmp_path, FORMS[form])
    loaded = AutoTokenizer.from_pretrained(folder).chat_template
    assert chat_template(folder, None) == (loaded.get("default") if isinstance(loaded, dict) else loaded)


def test_chat_template_of_a_recipe_counts_before_the_folder(tmp_path: Path):
    assert chat_template(write(tmp_path, FORMS["jinja file"]), b"from the recipe\r\n") == "from the recipe\n"


def test_chat_template_of_a_processor_counts_without_another(tmp_path: Path):
    folder = write(tmp_path, {})
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert chat_template(folder, None) == "of the processor"


@pytest.mark.parametrize("content", ["no JSON", "[]", '"text"'])
def test_chat_template_in_an_unreadable_file_is_an_error(content: str, tmp_path: Path):
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(TemplateError, match="unreadable-chat-template"):
        chat_template(tmp_path, None)


def test_chat_template_with_another_encoding_is_an_error():
    with pytest.raises(TemplateError, match="unreadable-chat-template"):
        chat_template(Path("unused"), "für".encode("latin-1"))
