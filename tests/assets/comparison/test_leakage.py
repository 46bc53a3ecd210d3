"""Held-out prompts that were trained on before. Oracle: what each policy was trained on is written down by hand."""

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
from training.contract.store.manifest import Derivation, Source
from training.contract.store.store import JobResult, Store

BASE = fingerprint("base_model", "of the hub")
QUESTIONS = ("a", "b", "c", "d")


def prompt(question: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"Why {question}?", **fields}]


class World:
    """A store that is filled by hand: whatever the rules do not look at is left out."""

    def __init__(self, root: Path) -> None:
        self.store = Store(root)

    def made(self, kind: str, content: str, inputs: Mapping[str, str], **settings: Any) -> str:
        sources = {name: Source(kind=name, fingerprint=found) for name, found in inputs.items()}
        how = Derivation(kind=kind, code_version="1", inputs=sources, settings={"is": content, **settings})
        with self.store.staging() as staging:
            (staging / "file").write_text(content)
            return self.store.publish(staging, how, JobResult(fingerprint(kind, content), {})).fingerprint

    def data(self, name: str, trained: str, held_out: str, **fields: Any) -> str:
        """Preferences with these questions in their splits, a letter each, in that order."""
        split = [*(("train", each) for each in trained), *(("validation", each) for each in held_out)]
        rows = [{"row": row, "prompt": prompt(each, **fields), "split": name} for row, (name, each) in enumerate(split)]
        with self.store.staging() as staging:
            pq.write_table(pa.Table.from_pylist(rows), staging / "preferences.parquet")
            how = Derivation(kind="raw_preferences", code_version="1", inputs={}, settings={"is": name})
            return self.store.publish(staging, how, JobResult(fingerprint("raw_preferences", name), {})).fingerprint

    def policy(self, name: str, trained: str, *, base: str = BASE, champion: str | None = None) -> str:
        """A policy that was trained on these questions, a letter each."""
        pairs = self.made("tokenized_pairs", name, {"raw_preferences": self.data(name, trained, "z")})
        reference = self.made("reference_model", base, {"base_model": base})
        return self.made("policy", name, {"tokenized_pairs": pairs, "reference_model": reference}, champion=champion)

    def merged(self, adapter: str) -> str:
        return self.made("merged_policy", adapter, {"policy": adapter})

    def leakage(self, *policies: str, **fields: Any) -> Leakage:
        """That of the questions a, b, c and d, which are held out."""
        raw_preferences = self.data("evaluated", "xy", "".join(QUESTIONS), **fields)
        return find_leakage(
            self.store, policies, {each: {"row": 2 + n} for n, each in enumerate(QUESTIONS)}, raw_preferences
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")


def test_a_policy_that_starts_from_a_model_of_the_hub_was_trained_on_nothing_before(world: World):
    assert world.leakage(world.policy("first", "abxy")) == Leakage(frozenset(), (), ())


def test_what_the_champion_was_trained_on_leaks(world: World):
    champion = world.policy("first", "abxy")
    now = world.policy("second", "xy", champion=champion)
    assert world.leakage(now) == Leakage(frozenset("ab"), (champion,), ())


def test_what_a_released_reference_was_trained_on_leaks(world: World):
    first = world.policy("first", "cxy")
    assert world.leakage(world.policy("second", "xy", base=first)) == Leakage(frozenset("c"), (first,), ())


def test_an_adapter_leaks_by_the_model_that_it_is_merged_into(world: World):
    adapter = world.policy("adapter", "dx")
    merged = world.merged(adapter)
    for number, start in enumerate(({"champion": merged}, {"base": merged})):
        now = world.policy(f"now {number}", "xy", **start)
        assert world.leakage(now) == Leakage(frozenset("d"), (merged,), ())


def test_all_that_came_before_counts_each_once(world: World):
    """The champion and its reference both go back to the same first policy."""
    first = world.policy("first", "a")
    second = world.policy("second", "b", base=first)
    third = world.policy("third", "cb", base=first, champion=second)
    now = world.policy("now", "d", base=first, champion=third)
    assert world.leakage(now) == Leakage(frozenset("abc"), (third, first, second), ())


def test_of_two_policies_one_may_have_started_from_the_other(world: World):
    """What a policy was trained on itself counts only where the other one started from it."""
    first = world.policy("first", "a")
    champion = world.policy("champion", "b", champion=first)
    now = world.policy("now", "d", champion=champion)
    assert world.leakage(now, champion).pairs == world.leakage(champion, now).pairs == {"a", "b"}
    apart = world.policy("apart", "c")
    assert world.leakage(apart, champion) == Leakage(frozenset("a"), (first,), ())


def test_roles_and_contents_alone_make_a_prompt_as_they_decide_its_split(world: World):
    """An earlier version wrote fewer fields of a message, and ids of calls may be others in each export."""
    champion = world.policy("first", "a")
    now = world.policy("second", "xy", champion=champion)
    assert world.leakage(now, tool_call_id="1").pairs == {"a"}


@pytest.mark.parametrize("kind", ["policy", "tokenized_pairs", "raw_preferences"])
def test_what_the_store_no_longer_has_is_unknown(world: World, kind: str):
    """Of what came before that, the rest is known, as far as the way there is."""
    first = world.policy("first", "a")
    second = world.policy("second", "b", champion=first)
    now = world.policy("now", "d", champion=second)
    content = {"policy": second}.get(kind, fingerprint(kind, "second"))
    shutil.rmtree(world.store.folder(kind, content))
    expected = Leakage(frozenset(), (), (second,)) if kind == "policy" else Leakage(frozenset("a"), (first,), (second,))
    assert world.leakage(now) == expected


def test_a_corrupt_one_is_unknown(world: World):
    champion = world.policy("first", "a")
    now = world.policy("second", "xy", champion=champion)
    said = world.store.folder("raw_preferences", fingerprint("raw_preferences", "first")) / "preferences.parquet"
    said.write_bytes(bytes(said.stat().st_size))
    assert world.leakage(now) == Leakage(frozenset(), (), (champion,))


def test_the_check_tells_how_many_pairs_leaked_and_from_whom():
    first, second = "1" * 64, "2" * 64
    none = checks.leakage(Leakage(frozenset(), (), ()), 9)
    assert none.passed and none.description == "the policy started from none that a recipe of this store has trained"
    clean = checks.leakage(Leakage(frozenset(), (first,), ()), 9)
    assert clean.passed and (clean.description or "").startswith("0 of 9 held-out pairs have prompts")
    some = checks.leakage(Leakage(frozenset("ab"), (first,), (second,)), 9)
    assert not some.passed and some.metadata["leaked_pairs"].value == 2
    told = some.description or ""
    assert told.startswith("2 of 9 held-out pairs") and f"started from ({short(first)}): " in told
    assert told.endswith(f"what {short(second)} was trained on is not in this store")
