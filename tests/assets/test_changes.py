"""What is different in words, of records that an earlier version of the project wrote."""

from dataclasses import replace
from typing import Any

from assets.changes import changes_since
from assets.graph import derivation
from assets.locate import LocatedSource
from assets.realize import record
from assets.world import FoundData
from tests.workflows.in_process import services_in


def _source(hub: dict[str, Any]) -> FoundData:
    identity = {"hub": "org/pairs", "config": None, "split": "train", **hub}
    source = LocatedSource({"hub": "org/pairs", "split": "train", "revision": "c" * 40}, identity, [])
    how = derivation("preference_source", {}, {"sources": [identity]})
    return FoundData(how, "f" * 64, {"sources.json": []}, [source])


def test_a_data_set_of_the_hub_that_was_known_by_its_commit_alone(tmp_path):
    """Since then its files are part of its identity; whoever looks is told that it differs, and in what."""
    services = services_in(tmp_path)
    old = _source({"commit": "a" * 40})
    made = record(services, old)
    new = _source({"configs": None, "files": {"train.jsonl": "b" * 40}})
    words = changes_since(services.store, made.artifact.derivation.key, replace(new, fingerprint="e" * 64))
    assert words == [
        f"hub data set.commit {'a' * 40} -> absent",
        "hub data set.configs absent -> null",
        "org/pairs at commit cccccccccccc: train.jsonl added",
    ]
