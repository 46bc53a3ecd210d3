"""The files that are released beside the weights."""

import json
from pathlib import Path

import pytest

from tests.training.workshop import NAMED, Workshop, hashes_of
from training.contract.errors import TemplateError

pytestmark = pytest.mark.shared


@pytest.fixture
def collect(tmp_path, tiny_chat):
    """Does the job for tiny-chat's tokenizer and a base model with these fields in its config.json."""

    workshop = Workshop(tmp_path)

    def collected(model_type="llama", eos_token_ids=(2,), **settings):
        of_base = {"base_generation": {"eos_token_id": 2, "pad_token_id": 0}, "eos_token_ids": list(eos_token_ids)}
        of_base |= {"processors": {}, "base_config": {"model_type": model_type}, "template_kwargs": {}}
        locations = {"tokenizer": str(tiny_chat), "chat_template": None, "named": NAMED, "base": str(tiny_chat)}
        settings = {**hashes_of(tiny_chat), **of_base, **settings}
        return workshop.do(workshop.job("release_files", "release_spec", {}, settings, locations))

    return collected


def read(folder: Path, name: str):
    return json.loads((folder / name).read_text())


def test_release_has_tokenizer_settings_and_the_tokens_at_which_it_stops(collect):
    made = collect(eos_tokens=["<|endoftext|>"])
    assert read(made.folder, "model/generation_config.json") == {
        **{"eos_token_id": [0, 2], "pad_token_id": 0},
        **{"do_sample": False, "temperature": 0.0},
    }
    assert read(made.folder, "tokenizer/tokenizer_config.json")["pad_token"] == "<|endoftext|>"
    assert made.details["notes"] == []


@pytest.mark.parametrize(
    ("ids", "told"), [((0,), "(<|endoftext|>)"), ((), "(none)"), ((2, 0), None), ((5000,), "(5000)")]
)
def test_note_of_an_end_of_turn_that_does_not_stop_the_model(collect, ids, told):
    notes = collect(eos_token_ids=ids).details["notes"]
    assert len(notes) == (told is not None) and all(told in note for note in notes)


def test_unknown_token_to_stop_at_is_refused(collect):
    with pytest.raises(TemplateError, match=r"`release\.eos_tokens` has '<\|nowhere\|>'"):
        collect(eos_tokens=["<|nowhere|>"])


def test_tokenizer_that_the_base_model_would_load_as_another_is_refused(collect):
    """transformers loads whatever stands beside a config.json of Qwen 2 as Qwen's tokenizer, with its way to split texts."""
    with pytest.raises(
        TemplateError, match=r"^recipe\.yaml:7: tokenization\.tokenizer: .*other tokens beside the config\.json"
    ):
        collect(model_type="qwen2")
