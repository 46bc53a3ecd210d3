"""Files of a recipe's sources and tokenizer: the job reads the files that were hashed."""

import hashlib

import pytest

from assets.bodies.data import preferences_work
from assets.inputs.current import find_data
from assets.inputs.resolve import locate_base_model, locate_tokenizer
from model_registry.registry import Registry
from tests.workflows.homes import ATTRIBUTES, write_recipe
from training.contract.config.key_settings import key_settings
from training.contract.errors import ModelError, PedigreeError
from workflows.recipes.discovery import load_recipe


def test_the_job_gets_the_files_that_were_hashed_with_their_hashes(tmp_path):
    attributes = {**ATTRIBUTES, "data": {"sources": [{"path": "rows"}, {"path": "rows/*.ndjson"}]}}
    folder = write_recipe(tmp_path / "small", attributes)
    rows = folder / "rows"
    for name in ("a/1.jsonl", "b.ndjson", ".cache/c.jsonl", ".d.csv"):
        (rows / name).parent.mkdir(parents=True, exist_ok=True)
        (rows / name).write_text(f'{{"name": "{name}"}}\n')
    pipeline = load_recipe(folder).pipeline
    found = find_data(pipeline)
    sha256 = {name: hashlib.sha256((rows / name).read_bytes()).hexdigest() for name in ("a/1.jsonl", "b.ndjson")}
    files = preferences_work(pipeline, found).locations.model_dump(mode="json")["files"]
    assert files == [
        [{"name": name, "path": str(rows / name), "sha256": sha} for name, sha in sha256.items()],
        [{"name": "b.ndjson", "path": str(rows / "b.ndjson"), "sha256": sha256["b.ndjson"]}],
    ]
    assert [[file["sha256"] for file in source] for source in found.files["sources.json"]] == [
        [file["sha256"] for file in source] for source in files
    ]


@pytest.mark.parametrize(
    ("setting", "added"),
    [
        ({"fraction": 1.0, "columns": {}}, {}),
        ({"fraction": 0.5}, {"fractions": [1.0, 0.5]}),
        ({"columns": {"prompt": "input", "tools": None}}, {"columns": [{}, {"prompt": "input", "tools": None}]}),
    ],
)
def test_setting_of_one_source_is_passed_with_all_sources(tmp_path, setting, added):
    """Without a setting the job has no field for it, so that such data keep their key."""
    sources = [{"path": "a.jsonl"}, {"path": "b.jsonl", **setting}]
    folder = write_recipe(tmp_path / "small", {**ATTRIBUTES, "data": {"sources": sources}})
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_text("{}\n")
    pipeline = load_recipe(folder).pipeline
    settings = preferences_work(pipeline, find_data(pipeline)).settings
    always = {"formats": ["auto", "auto"], "held_out": [False, False], "validation_fraction": 0.1, "duplicates": "keep"}
    assert key_settings(settings) == {**always, **added}


@pytest.mark.parametrize("paths", [["rows"], ["rows/1.jsonl", "rows/2.jsonl"]], ids=["a folder", "two files"])
def test_files_in_another_order_are_other_data(tmp_path, paths):
    """The order of the rows decides the batches."""
    sources = {"data": {"sources": [{"path": path} for path in paths]}}
    pipeline = load_recipe(write_recipe(tmp_path / "small", {**ATTRIBUTES, **sources})).pipeline
    found = []
    for order in (("one", "two"), ("two", "one")):
        (rows := tmp_path / "small" / "rows").mkdir(exist_ok=True)
        for number, word in enumerate(order, 1):
            (rows / f"{number}.jsonl").write_text(f'{{"word": "{word}"}}\n')
        found.append(find_data(pipeline).fingerprint)
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ("tokenizer_config.json", None),
        ("tokenizer_config.json vocab.json", None),
        ("tokenizer_config.json vocab.txt", "tokenizer_config.json vocab.txt"),
        ("merges.txt tokenizer_config.json vocab.json README.md", "merges.txt tokenizer_config.json vocab.json"),
    ],
)
def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path, files, found):
    """transformers would build one from its config, in which every text is unknown."""
    pipeline = load_recipe(
        write_recipe(tmp_path / "small", {**ATTRIBUTES, "tokenization": {"tokenizer": "./own"}})
    ).pipeline
    (own := tmp_path / "small" / "own").mkdir()
    for name in files.split():
        (own / name).write_text("{}")
    registry = Registry("unused", tmp_path)
    if found is None:
        with pytest.raises(ModelError, match=r"defs\.yaml:\d+: tokenization\.tokenizer: .*/own .*\[no-tokenizer\]"):
            locate_tokenizer(pipeline, registry)
    else:
        assert set(locate_tokenizer(pipeline, registry).identity.files) == set(found.split())


LONG = f"./{'x' * 300}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": {"sources": [{"path": LONG}]}},
            r"sources\.0\.path: \./x+: /.*/x+ .*File name too long.*\[unreadable-path\]",
        ),
        ({"reference": {"model": LONG}}, r"model: \./x+: /.*/x+ .*File name too long.*\[unreadable-path\]"),
        ({"reference": {"model": "./file"}}, r"model: \./file: /.*/file .*\[no-model-folder\]"),
        ({"reference": {"model": "./none"}}, r"model: \./none: /.*/none .*\[no-model-folder\]"),
        ({"tokenization": {"chat_template": "folder"}}, r"chat_template: folder: /.*/folder .*\[no-template-file\]"),
        ({"tokenization": {"chat_template": "none"}}, r"chat_template: none: /.*/none .*\[no-template-file\]"),
    ],
)
def test_missing_path_is_reported_with_its_line(tmp_path, changes, message):
    folder = write_recipe(tmp_path / "small", {**ATTRIBUTES, "reference": {"model": "./folder"}, **changes})
    (folder / "folder").mkdir()
    (folder / "folder" / "tokenizer.json").write_text("{}")
    (folder / "file").write_text("")
    pipeline, registry = load_recipe(folder).pipeline, Registry("unused", tmp_path)
    readers = {
        "data": lambda: find_data(pipeline),
        "reference": lambda: locate_base_model(pipeline, registry),
        "tokenization": lambda: locate_tokenizer(pipeline, registry),
    }
    with pytest.raises(PedigreeError, match=rf"^{folder}/defs\.yaml:\d+: \w+\.{message}"):
        readers[next(iter(changes))]()
