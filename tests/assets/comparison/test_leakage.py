"""Leakage of held-out prompts. Oracle: hand-written training data of each policy."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assets.bodies import checks
from assets.comparison.leakage import Leakage, find_leakage
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.store.artifact import JobResult
from training.contract.store.manifest import Derivation, Source
from training.contract.store.store import Store

BASE = fingerprint("base_model", "of the hub")
QUESTIONS = ("a", "b", "c", "d")


def prompt(question: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"Why {question}?", **fields}]


class Lineages:
    """A hand-filled store, with only the files and fields that leakage depends on."""

    def __init__(self, root: Path) -> None:
        self.store = Store(root)

    def publish(self, kind: str, content: str, inputs: Mapping[str, str], **settings: Any) -> str:
        sources = {name: Source(kind=name, fingerprint=digest) for name, digest in inputs.items()}
        derivation = Derivation(kind=kind, code_version="1", inputs=sources, settings={"is": content, **settings})
        with self.store.staging() as staging:
            (staging / "file").write_text(content)
            return self.store.publish(staging, derivation, JobResult(fingerprint(kind, content))).fingerprint

    def data(self, name: str, trained: str, held_out: str, **fields: Any) -> str:
        """Publish preferences with these questions, one letter each, in order."""
        splits = [*(("train", letter) for letter in trained), *(("validation", letter) for letter in held_out)]
        rows = [
            {"row": row, "prompt": prompt(letter, **fields), "split": split}
            for row, (split, letter) in enumerate(splits)
        ]
        with self.store.staging() as staging:
            pq.write_table(pa.Table.from_pylist(rows), staging / "preferences.parquet")
            derivation = Derivation(kind="raw_preferences", code_version="1", inputs={}, settings={"is": name})
            result = JobResult(fingerprint("raw_preferences", name))
            return self.store.publish(staging, derivation, result).fingerprint

    def policy(self, name: str, trained: str, *, base: str = BASE, champion: str | None = None) -> str:
        """Publish a policy trained on these questions, one letter each."""
        pairs = self.publish("tokenized_pairs", name, {"raw_preferences": self.data(name, trained, "z")})
        reference = self.publish("reference_model", base, {"base_model": base})
        return self.publish("policy", name, {"tokenized_pairs": pairs, "reference_model": reference}, champion=champion)

    def merged(self, adapter: str) -> str:
        return self.publish("merged_policy", adapter, {"policy": adapter})

    def leakage(self, *policies: str, **fields: Any) -> Leakage:
        """Return the leakage of the held-out questions a, b, c and d."""
        raw_preferences = self.data("evaluated", "xy", "".join(QUESTIONS), **fields)
        rows = {letter: {"row": 2 + n} for n, letter in enumerate(QUESTIONS)}
        return find_leakage(self.store, policies, rows, raw_preferences)


@pytest.fixture
def lineages(tmp_path: Path) -> Lineages:
    return Lineages(tmp_path / "store")


def test_leakage_from_a_hub_model_is_empty(lineages: Lineages):
    assert lineages.leakage(lineages.policy("first", "abxy")) == Leakage(frozenset(), (), ())


def test_leakage_includes_training_data_of_the_champion(lineages: Lineages):
    champion = lineages.policy("first", "abxy")
    policy = lineages.policy("second", "xy", champion=champion)
    assert lineages.leakage(policy) == Leakage(frozenset("ab"), (champion,), ())


def test_leakage_includes_training_data_of_a_released_reference(lineages: Lineages):
    first = lineages.policy("first", "cxy")
    assert lineages.leakage(lineages.policy("second", "xy", base=first)) == Leakage(frozenset("c"), (first,), ())


def test_leakage_follows_a_merged_model_to_its_adapter(lineages: Lineages):
    adapter = lineages.policy("adapter", "dx")
    merged = lineages.merged(adapter)
    for number, start in enumerate(({"champion": merged}, {"base": merged})):
        policy = lineages.policy(f"now {number}", "xy", **start)
        assert lineages.leakage(policy) == Leakage(frozenset("d"), (merged,), ())


def test_leakage_counts_a_shared_ancestor_once(lineages: Lineages):
    """Champion and reference both start from the first policy."""
    first = lineages.policy("first", "a")
    second = lineages.policy("second", "b", base=first)
    third = lineages.policy("third", "cb", base=first, champion=second)
    policy = lineages.policy("now", "d", base=first, champion=third)
    assert lineages.leakage(policy) == Leakage(frozenset("abc"), (third, first, second), ())


def test_leakage_of_two_policies_counts_one_as_start_of_the_other(lineages: Lineages):
    """A policy's own training data count only if the other policy started from it."""
    first = lineages.policy("first", "a")
    champion = lineages.policy("champion", "b", champion=first)
    policy = lineages.policy("now", "d", champion=champion)
    assert lineages.leakage(policy, champion).pairs == lineages.leakage(champion, policy).pairs == {"a", "b"}
    independent = lineages.policy("apart", "c")
    assert lineages.leakage(independent, champion) == Leakage(frozenset("a"), (first,), ())


def test_leakage_compares_only_roles_and_contents(lineages: Lineages):
    """Roles and contents decide the split. An earlier version wrote fewer fields, and call ids differ between exports."""
    champion = lineages.policy("first", "a")
    policy = lineages.policy("second", "xy", champion=champion)
    assert lineages.leakage(policy, tool_call_id="1").pairs == {"a"}


@pytest.mark.parametrize("kind", ["policy", "tokenized_pairs", "raw_preferences"])
def test_leakage_from_a_missing_artifact_is_unknown(lineages: Lineages, kind: str):
    """Earlier policies are known unless a policy on the way to them is missing."""
    first = lineages.policy("first", "a")
    second = lineages.policy("second", "b", champion=first)
    policy = lineages.policy("now", "d", champion=second)
    digest = {"policy": second}.get(kind, fingerprint(kind, "second"))
    shutil.rmtree(lineages.store.folder(kind, digest))
    expected = Leakage(frozenset(), (), (second,)) if kind == "policy" else Leakage(frozenset("a"), (first,), (second,))
    assert lineages.leakage(policy) == expected


def test_leakage_from_corrupt_data_is_unknown(lineages: Lineages):
    champion = lineages.policy("first", "a")
    policy = lineages.policy("second", "xy", champion=champion)
    rows = lineages.store.folder("raw_preferences", fingerprint("raw_preferences", "first")) / "preferences.parquet"
    rows.write_bytes(bytes(rows.stat().st_size))
    assert lineages.leakage(policy) == Leakage(frozenset(), (), (champion,))


def test_leakage_check_describes_counts_and_policies():
    first, second = "1" * 64, "2" * 64
    without_start = checks.leakage(Leakage(frozenset(), (), ()), 9)
    assert without_start.passed and "0 of 9" not in (without_start.description or "")
    clean = checks.leakage(Leakage(frozenset(), (first,), ()), 9)
    assert clean.passed and (clean.description or "").startswith("0 of 9 held-out pairs")
    leaked = checks.leakage(Leakage(frozenset("ab"), (first,), (second,)), 9)
    assert not leaked.passed and leaked.metadata["leaked_pairs"].value == 2
    description = leaked.description or ""
    known, unknown = description.split("; ")
    assert known.startswith("2 of 9 held-out pairs") and short(first) in known and "training.start_from" in known
    assert short(second) in unknown and short(first) not in unknown
