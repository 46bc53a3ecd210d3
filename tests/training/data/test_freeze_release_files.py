"""The `release_files` job: the files that are released beside the weights."""

import json
from pathlib import Path

import pytest

from tests.training.job_runner import NAMED, JobRunner, hashes_of
from training.contract.errors import TemplateError

pytestmark = pytest.mark.shared


@pytest.fixture
def collect(tmp_path, tiny_chat):
    """Run the job for tiny-chat's tokenizer and a base model with these fields in its config.json."""

    job_runner = JobRunner(tmp_path)

    def collected(model_type="llama", eos_token_ids=(2,), **settings):
        base = {"base_generation": {"eos_token_id": 2, "pad_token_id": 0}, "eos_token_ids": list(eos_token_ids)}
        base |= {"processors": {}, "base_config": {"model_type": model_type}, "template_kwargs": {}}
        locations = {"tokenizer": str(tiny_chat), "chat_template": None, "named": NAMED, "base": str(tiny_chat)}
        settings = {**hashes_of(tiny_chat), **base, **settings}
        return job_runner.run(job_runner.job("release_files", "release_spec", {}, settings, locations))

    return collected


def read(folder: Path, name: str):
    return json.loads((folder / name).read_text())


def test_release_files_have_the_eos_tokens_and_the_tokenizer_settings(collect):
    release = collect(eos_tokens=["<|endoftext|>"])
    assert read(release.folder, "model/generation_config.json") == {
        **{"eos_token_id": [0, 2], "pad_token_id": 0},
        **{"do_sample": False, "temperature": 0.0},
    }
    assert read(release.folder, "tokenizer/tokenizer_config.json")["pad_token"] == "<|endoftext|>"
    assert release.details.notes == ()


@pytest.mark.parametrize(
    ("ids", "tokens"), [((0,), "(<|endoftext|>)"), ((), "(none)"), ((2, 0), None), ((5000,), "(5000)")]
)
def test_release_files_note_an_end_of_turn_that_does_not_stop_the_model(collect, ids, tokens):
    notes = collect(eos_token_ids=ids).details.notes
    assert len(notes) == (tokens is not None) and all(tokens in note for note in notes)


def test_release_files_with_an_unknown_eos_token_raise(collect):
    with pytest.raises(TemplateError, match=r"`release\.eos_tokens` .*'<\|nowhere\|>'.*\[unknown-eos-token\]"):
        collect(eos_tokens=["<|nowhere|>"])


def test_release_files_with_a_tokenizer_of_another_class_raise(collect):
    """Beside a config.json of Qwen 2, transformers loads each tokenizer as Qwen's, with its pre-tokenizer."""
    with pytest.raises(
        TemplateError, match=r"^recipe\.yaml:7: tokenization\.tokenizer: .*\[tokenizer-class-mismatch\]"
    ):
        collect(model_type="qwen2")
