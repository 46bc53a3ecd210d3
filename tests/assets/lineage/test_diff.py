"""What is different in words, of records written by hand."""

from logging import getLogger
from typing import Any

import pytest

from assets.execution.materialize import publish_resolved
from assets.inputs.current import ResolvedData
from assets.inputs.resolve import LocatedSource, LocatedTokenizer
from assets.lineage.diff import changes_since
from assets.lineage.settings_diff import setting_changes
from assets.lineage.tokenizer_diff import tokenizer_changes
from assets.pipeline.graph import derive
from tests.workflows.in_process import services_in
from training.contract.store.store import JobResult, write_json


def _source(hub: dict[str, Any]) -> ResolvedData:
    identity = {"hub": "org/pairs", "config": None, "split": "train", "configs": None, **hub}
    source = LocatedSource({"hub": "org/pairs", "split": "train", "revision": "c" * 40}, identity, [])
    how = derive("preference_source", {}, {"sources": [identity]})
    return ResolvedData(how, "f" * 64, {"sources.json": []}, [source])


def test_a_line_of_the_template_that_is_a_rule(tmp_path):
    """In a diff it looks like the name of a file."""
    store, how = services_in(tmp_path).store, derive("tokenization_spec", {}, {})
    with store.staging() as staging:
        write_json(staging / "spec.json", {"template": "Answer.\n---\n"})
        before = store.publish(staging, how, JobResult("f" * 64))
    (tmp_path / "now.jinja").write_text("Answer.\n+++\n")
    now = LocatedTokenizer(tmp_path, tmp_path / "now.jinja", {})
    assert list(tokenizer_changes(before, now, {"template"})) == ["chat template changed: line 2\n    ----\n    ++++"]


def test_a_list_is_shown_as_it_is_written():
    told = setting_changes({"betas": [0.9, None], "tied": [False]}, {"betas": [0.9, "x"], "tied": [True]})
    assert list(told) == ["betas [0.9, null] -> [0.9, x]", "tied [false] -> [true]"]


def test_settings_of_sources_are_told_a_source_at_a_time():
    before = {"formats": ["auto"], "held_out": [False], "validation_fraction": 0.1}
    now = {
        "formats": ["auto"],
        "held_out": [True],
        "columns": [{"prompt": "q"}],
        "names": ["new"],
        "validation_fraction": 0.2,
    }
    assert list(setting_changes(before, now)) == [
        "sources.0.columns.prompt absent -> q",
        "sources.0.held_out false -> true",
        "sources.0.name null -> new",
        "validation_fraction 0.1 -> 0.2",
    ]
    another = {
        "formats": ["auto", "hh"],
        "held_out": [False, True],
        "fractions": [1.0, 0.5],
        "validation_fraction": 0.1,
    }
    assert list(setting_changes(before, another)) == [
        "sources.1 absent -> {format: hh, columns: {}, roles: {}, held_out: true, fraction: 0.5, name: null}"
    ]


def test_no_file_is_named_where_a_token_is(tmp_path):
    """Not even where the template changed as well: whatever else differs in the files may follow from both."""
    store, how = services_in(tmp_path).store, derive("tokenization_spec", {}, {})
    with store.staging() as staging:
        write_json(staging / "spec.json", {"template": "Answer.\n"})
        before = store.publish(staging, how, JobResult("f" * 64))
    write_json(tmp_path / "tokenizer.json", {"added_tokens": [{"id": 0, "content": "<|tool|>"}]})
    (tmp_path / "chat_template.jinja").write_text("Answer!\n")
    told = list(
        tokenizer_changes(before, LocatedTokenizer(tmp_path, None, {}), {"chat_template.jinja", "tokenizer.json"})
    )
    assert told == ["chat template changed: line 1\n    -Answer.\n    +Answer!", "tokenizer gained token <|tool|>"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", {"added_tokens": [{"id": 1}]}),
        ("tokenizer.json", {"model": {"vocab": [["a", 0.0, 1]]}}),
        ("tokenizer.json", {"model": None}),
        ("tokenizer.json", {"added_tokens": None}),
        ("tokenizer.json", {"model": {"vocab": [7]}}),
        ("tokenizer_config.json", {"chat_template": [{"template": "x"}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"first": {"content": "a"}}}),
        ("special_tokens_map.json", []),
    ],
)
def test_a_file_of_an_unknown_form_is_named(tmp_path, file, content):
    """Transformers may or may not load it: that is for the job to find, and no reason for `status` to end."""
    store, how = services_in(tmp_path).store, derive("tokenization_spec", {}, {})
    with store.staging() as staging:
        write_json(staging / "spec.json", {"template": None})
        before = store.publish(staging, how, JobResult("f" * 64))
    write_json(tmp_path / file, content)
    assert list(tokenizer_changes(before, LocatedTokenizer(tmp_path, None, {}), {file})) == [f"{file} differs"]


def test_the_files_of_a_data_set_of_the_hub_and_another_in_its_place(tmp_path):
    """Five files are named and the rest counted, by hand; of another data set no file is compared with any of the first."""
    services, digit = services_in(tmp_path), "ab"
    old, new = (_source({"files": {f"{n}.csv": d * 40 for n in range(7)}}) for d in digit)
    made = publish_resolved(services, old, getLogger())
    names = ", ".join(f"{n}.csv differs" for n in range(5))
    key = made.artifact.derivation.key
    assert changes_since(services.store, key, new) == [f"org/pairs at commit cccccccccccc: {names}, and 2 more"]
    other = _source({"hub": "org/others", "files": {"8.csv": "d" * 40}})
    assert changes_since(services.store, key, other) == ["hub data set.hub org/pairs -> org/others"]


def test_files_of_one_name_and_their_order(tmp_path):
    """Of files with one name each further one has a number; the order decides which rows come first."""
    services = services_in(tmp_path)

    def found(*files: tuple[str, str]) -> ResolvedData:
        identity = [{"name": name, "bytes": 1, "sha256": digit * 64} for name, digit in files]
        how = derive("preference_source", {}, {"sources": [identity]})
        return ResolvedData(how, "f" * 64, {"sources.json": [identity]}, [LocatedSource({"hub": None}, identity, [])])

    with services.store.staging() as staging:
        key = services.store.publish(
            staging, found(("a.jsonl", "1"), ("b.jsonl", "2")).derivation, JobResult("f" * 64)
        ).derivation.key
    assert changes_since(services.store, key, found(("b.jsonl", "2"), ("a.jsonl", "1"))) == [
        "the order of the files, or how the sources divide them, changed"
    ]
    more = found(("a.jsonl", "1"), ("b.jsonl", "2"), ("a.jsonl", "3"))
    assert changes_since(services.store, key, more) == ["a.jsonl (2) added"]
    assert changes_since(services.store, key, found(("b.jsonl", "2"))) == ["a.jsonl removed"]
