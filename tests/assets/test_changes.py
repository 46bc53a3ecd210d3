"""What is different in words, of records that an earlier version of the project wrote."""

from dataclasses import replace
from typing import Any

import pytest

from assets.changes import changes_since
from assets.graph import derivation
from assets.locate import LocatedData, LocatedSource
from assets.realize import record
from assets.world import FoundData
from tests.workflows.in_process import services_in


def _source(hub: dict[str, Any]) -> FoundData:
    identity = {"hub": "org/pairs", "config": None, "split": "train", **hub}
    located = LocatedData([LocatedSource({"hub": "org/pairs", "revision": "c" * 40}, identity, [])])
    how = derivation("preference_source", {}, {"sources": located.identity})
    return FoundData(how, "f" * 64, {"sources.json": []}, located)


def test_a_data_set_of_the_hub_that_was_known_by_its_commit_alone(tmp_path):
    """Since then its files are part of its identity; whoever looks is told that it differs, and in what."""
    services = services_in(tmp_path)
    old = _source({"commit": "a" * 40})
    made = record(services, old.derivation, "f" * 64, old.files)
    new = _source({"configs": None, "files": {"train.jsonl": "b" * 40}})
    words = changes_since(services.store, made.artifact.derivation.key, replace(new, fingerprint="e" * 64))
    assert words == [
        f"hub data set.commit {'a' * 40} -> absent",
        "hub data set.configs absent -> null",
        "org/pairs at commit cccccccccccc: train.jsonl added",
    ]


@pytest.mark.parametrize("apart", [False, True], ids=["one source", "a source each"])
def test_files_of_one_name_and_their_order(tmp_path, apart):
    """Of files with one name each further one has a number; the order decides which rows come first."""
    services = services_in(tmp_path)

    def found(*files: tuple[str, str]) -> FoundData:
        identity = [{"name": name, "bytes": 1, "sha256": digit * 64} for name, digit in files]
        sources = [[entry] for entry in identity] if apart else [identity]
        located = LocatedData([LocatedSource({"hub": None}, source, []) for source in sources])
        how = derivation("preference_source", {}, {"sources": located.identity})
        return FoundData(how, located.fingerprint, {"sources.json": located.identity}, located)

    old, other = found(("a.jsonl", "1"), ("b.jsonl", "2")), found(("b.jsonl", "2"), ("a.jsonl", "1"))
    record(services, old.derivation, old.located.fingerprint, old.files)
    assert old.fingerprint != other.fingerprint
    assert changes_since(services.store, old.derivation.key, other) == ["the order of the files changed"]
    more = found(("a.jsonl", "1"), ("b.jsonl", "2"), ("a.jsonl", "3"))
    assert changes_since(services.store, old.derivation.key, more) == ["a.jsonl (2) added"]
