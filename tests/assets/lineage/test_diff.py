"""Changes as text. Oracle: hand-written records."""

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
from tests import factories
from tests.workflows.in_process import services_in
from training.contract.config.data_source import DataSource
from training.contract.protocol.artifacts import PREFERENCE_SOURCE
from training.contract.protocol.settings import SourcesSettings
from training.contract.store.artifact import JobResult, write_json


def _source(hub: dict[str, Any]) -> ResolvedData:
    identity = {"hub": "org/pairs", "config": None, "split": "train", "configs": None, **hub}
    source = LocatedSource(DataSource(hub="org/pairs", split="train", revision="c" * 40), identity, [])
    how = derive("preference_source", {}, SourcesSettings(sources=(identity,)))
    return ResolvedData(how, "f" * 64, {"sources.json": []}, [source])


def test_tokenizer_changes_shows_template_lines_of_dashes(tmp_path):
    """In a diff such a line looks like a file header."""
    store, derivation = services_in(tmp_path).store, derive("tokenization_spec", {})
    with store.staging() as staging:
        write_json(staging / "spec.json", {"template": "Answer.\n---\n"})
        before = store.publish(staging, derivation, JobResult("f" * 64))
    (tmp_path / "now.jinja").write_text("Answer.\n+++\n")
    now = LocatedTokenizer(tmp_path, tmp_path / "now.jinja", factories.tokenizer_identity())
    assert list(tokenizer_changes(before, now, {"template"})) == ["chat template changed: line 2\n    ----\n    ++++"]


def test_setting_changes_writes_lists_as_in_a_recipe():
    changes = setting_changes({"betas": [0.9, None], "tied": [False]}, {"betas": [0.9, "x"], "tied": [True]})
    assert list(changes) == ["betas [0.9, null] -> [0.9, x]", "tied [false] -> [true]"]


def test_setting_changes_groups_source_settings_by_source():
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


def test_tokenizer_changes_with_changed_tokens_names_no_file(tmp_path):
    """A changed template does not add the file either: other differences in the files may follow from both."""
    store, derivation = services_in(tmp_path).store, derive("tokenization_spec", {})
    with store.staging() as staging:
        write_json(staging / "spec.json", {"template": "Answer.\n"})
        before = store.publish(staging, derivation, JobResult("f" * 64))
    write_json(tmp_path / "tokenizer.json", {"added_tokens": [{"id": 0, "content": "<|tool|>"}]})
    (tmp_path / "chat_template.jinja").write_text("Answer!\n")
    now = LocatedTokenizer(tmp_path, None, factories.tokenizer_identity())
    changes = list(tokenizer_changes(before, now, {"chat_template.jinja", "tokenizer.json"}))
    assert changes == ["chat template changed: line 1\n    -Answer.\n    +Answer!", "tokenizer gained token <|tool|>"]


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
def test_tokenizer_changes_with_an_unknown_file_form_names_the_file(tmp_path, file, content):
    """Transformers may or may not load it. The job finds out; `pedigree status` must not fail."""
    store, derivation = services_in(tmp_path).store, derive("tokenization_spec", {})
    with store.staging() as staging:
        write_json(staging / "spec.json", {"template": None})
        before = store.publish(staging, derivation, JobResult("f" * 64))
    write_json(tmp_path / file, content)
    assert list(
        tokenizer_changes(before, LocatedTokenizer(tmp_path, None, factories.tokenizer_identity()), {file})
    ) == [f"{file} differs"]


def test_changes_since_of_a_hub_data_set_names_five_files(tmp_path):
    """By hand: five files are named and the rest counted. Files of another data set are not compared."""
    services = services_in(tmp_path)
    old, new = (_source({"files": {f"{n}.csv": digit * 40 for n in range(7)}}) for digit in "ab")
    published = publish_resolved(services, PREFERENCE_SOURCE, old, getLogger())
    names = ", ".join(f"{n}.csv differs" for n in range(5))
    key = published.artifact.derivation.key
    assert changes_since(services.store, key, new) == [f"org/pairs at commit cccccccccccc: {names}, and 2 more"]
    other = _source({"hub": "org/others", "files": {"8.csv": "d" * 40}})
    assert changes_since(services.store, key, other) == ["hub data set.hub org/pairs -> org/others"]


def test_changes_since_of_files_reports_order_additions_and_removals(tmp_path):
    """The order of files decides the order of rows. A repeated name gets a number."""
    services = services_in(tmp_path)

    def resolve(*files: tuple[str, str]) -> ResolvedData:
        identity = [{"name": name, "bytes": 1, "sha256": digit * 64} for name, digit in files]
        derivation = derive("preference_source", {}, SourcesSettings(sources=(identity,)))
        source = LocatedSource(DataSource(path="rows.jsonl"), identity, [])
        return ResolvedData(derivation, "f" * 64, {"sources.json": [identity]}, [source])

    derivation = resolve(("a.jsonl", "1"), ("b.jsonl", "2")).derivation
    with services.store.staging() as staging:
        key = services.store.publish(staging, derivation, JobResult("f" * 64)).derivation.key
    [change] = changes_since(services.store, key, resolve(("b.jsonl", "2"), ("a.jsonl", "1")))
    assert "order of the files" in change
    more = resolve(("a.jsonl", "1"), ("b.jsonl", "2"), ("a.jsonl", "3"))
    assert changes_since(services.store, key, more) == ["a.jsonl (2) added"]
    assert changes_since(services.store, key, resolve(("b.jsonl", "2"))) == ["a.jsonl removed"]
