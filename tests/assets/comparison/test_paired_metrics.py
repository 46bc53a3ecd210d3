"""Pairs of two evaluations, by what is said in them. Oracle: rows written by hand, as earlier versions wrote them too."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assets.comparison.champion import compared
from assets.comparison.paired_metrics import common_measure, rows_by_messages, rows_by_pair
from assets.execution.asset_context import AssetContext
from model_registry.gate import Measure
from model_registry.model_version import Version, lineage_tags
from model_registry.registry import Registry
from training.contract.errors import RegistryUnavailable
from training.contract.store.manifest import Derivation, Source
from training.contract.store.store import Artifact, JobResult, Store

SAID = [("role", pa.string()), ("content", pa.string())]
CALLS = [*SAID, ("tool_calls", pa.string()), ("tool_call_id", pa.string()), ("name", pa.string())]


def published(store: Store, kind: str, file: str, table: pa.Table, key: str) -> Artifact:
    with store.staging() as staging:
        pq.write_table(table, staging / file)
        how = Derivation(kind=kind, code_version="1", inputs={}, settings={"key": key})
        return store.publish(staging, how, JobResult(key * 64, {}))


def preferences(store: Store, key: str, message: list[tuple[str, pa.DataType]], *further: str) -> Artifact:
    """Rows 0 and 1, with or without columns that came later."""
    messages = pa.list_(pa.struct(message))
    text = {name: pa.string() for name in ("split", "source", *further)}
    columns = {
        "row": pa.int64(),
        "prompt": messages,
        "chosen": messages,
        "rejected": messages,
        "line": pa.int64(),
        **text,
    }
    rows: list[dict[str, Any]] = [
        {
            "row": row, "prompt": [{"role": "user", "content": f"Why {row}?"}], "line": row,
            "chosen": [{"role": "assistant", "content": "Because."}],
            "rejected": [{"role": "assistant", "content": "No idea."}],
            "split": "validation", "source": key, "source_name": key, "identity": key,
        }
        for row in range(2)
    ]  # fmt: skip
    return published(
        store, "raw_preferences", "preferences.parquet", pa.Table.from_pylist(rows, pa.schema(columns)), key
    )


def test_pairs_are_the_same_whether_or_not_their_table_has_columns_that_came_later(tmp_path: Path):
    store = Store(tmp_path / "store")
    before = preferences(store, "a", SAID)
    now = preferences(store, "b", CALLS, "tools", "source_name", "identity")
    evaluation = published(store, "evaluation", "pairs.parquet", pa.table({"row": [1], "margin": [0.5]}), "c")
    found = [rows_by_messages(evaluation, each) for each in (before, now)]
    assert found[0] == found[1] and list(found[0].values()) == [{"row": 1, "margin": 0.5}]


def test_pairs_of_one_source_are_found_by_its_name(tmp_path: Path):
    """The pair a-b is in both sources. A table of before there were names has no pairs of any."""
    rows = [
        {"chosen_key": chosen, "rejected_key": rejected, "source_name": name}
        for chosen, rejected, name in (("a", "b", "old"), ("c", "d", "old"), ("e", "f", None), ("a", "b", "new"))
    ]
    store = Store(tmp_path / "store")
    named = published(store, "evaluation", "pairs.parquet", pa.Table.from_pylist(rows), "a")
    before = published(
        store, "evaluation", "pairs.parquet", pa.Table.from_pylist(rows).drop_columns("source_name"), "b"
    )
    found = {name: set(rows_by_pair(named, name)) for name in (None, "old", "new", "other")}
    assert found == {None: {"ab", "cd", "ef"}, "old": {"ab", "cd"}, "new": {"ab"}, "other": set()}
    assert set(rows_by_pair(before)) == {"ab", "cd", "ef"} and not rows_by_pair(before, "old")


def evaluated(
    store: Store,
    loss: str,
    reference: str,
    pairs: str = "c",
    weighting: str | None = None,
    *,
    rows: Sequence[dict[str, Any]] = (),
) -> Artifact:
    """An evaluation made from a reference and pairs with these fingerprints."""
    inputs = {
        kind: Source(kind=kind, fingerprint=digit * 64)
        for kind, digit in (("reference_model", reference), ("tokenized_pairs", pairs), ("policy", "e"))
    }
    settings = {"loss": {"type": loss, "weighting": weighting}}
    how = Derivation(kind="evaluation", code_version="1", inputs=inputs, settings=settings)
    with store.staging() as staging:
        pq.write_table(pa.Table.from_pylist(list(rows)), staging / "pairs.parquet")
        return store.publish(staging, how, JobResult(how.key, {}))


# SimPO has no reference, whatever its recipe names; AOT sorts the pairs of a batch, so a loss is one of all of them.
SHOWN_VALUES = {
    "all the same": (("sigmoid", "a"), ("sigmoid", "a"), Measure.LOSS),
    "other pairs beside": (("sigmoid", "a", "c"), ("sigmoid", "a", "d"), Measure.LOSS),
    "other pairs beside, which count": (("aot", "a", "c"), ("aot", "a", "d"), Measure.ERROR_RATE),
    "another weighting of the pairs in training": (("sigmoid", "a", "c", "wpo"), ("sigmoid", "a"), Measure.LOSS),
    "another loss": (("hinge", "a"), ("sigmoid", "a"), Measure.ERROR_RATE),
    "another reference": (("sigmoid", "b"), ("sigmoid", "a"), Measure.ERROR_RATE_OVER_CHAMPIONS_REFERENCE),
    "another reference, which neither has": (("simpo", "b"), ("simpo", "a"), Measure.LOSS),
    "another reference, which the candidate lacks": (
        *(("simpo", "b"), ("sigmoid", "a"), Measure.ERROR_RATE_OVER_CHAMPIONS_REFERENCE),
    ),
    "the reference that the champion lacks": (("sigmoid", "a"), ("simpo", "a"), Measure.ERROR_RATE),
    "another reference, which the champion lacks": (
        *(("sigmoid", "b"), ("simpo", "a"), Measure.ERROR_RATE_OVER_CHAMPIONS_REFERENCE),
    ),
}


@pytest.mark.parametrize(("candidate", "champion", "measure"), SHOWN_VALUES.values(), ids=SHOWN_VALUES)
def test_what_two_evaluations_have_in_common(
    tmp_path: Path, candidate: tuple[str, ...], champion: tuple[str, ...], measure: Measure
):
    ours, theirs = (evaluated(Store(tmp_path / "store"), *each) for each in (candidate, champion))
    assert common_measure(ours, theirs) == measure


def scored(chosen: Sequence[float], reference: Sequence[float]) -> list[dict[str, Any]]:
    """Pairs whose rejected responses have the log-prob 0 under policy and reference alike."""
    return [
        {
            "row": row, "chosen_key": f"c{row}", "rejected_key": f"r{row}", "margin": policy - frozen, "loss": 0.5,
            "policy_chosen_logprob": policy, "policy_rejected_logprob": 0.0,
            "reference_chosen_logprob": frozen, "reference_rejected_logprob": 0.0,
        }
        for row, (policy, frozen) in enumerate(zip(chosen, reference, strict=True))
    ]  # fmt: skip


def test_both_are_measured_over_the_champion_s_reference(tmp_path: Path):
    """The champion's has -3 in the first half of twenty pairs, the candidate's -5: of -4 the latter makes a pair that is ranked
    rightly. In the other half it is the candidate's, with -3, over which the champion's -4 would be ranked wrongly. Each two
    pairs have a prompt. The champion was trained without its reference, which is the one to measure over all the same."""
    store = Store(tmp_path / "store")
    said = pa.Table.from_pylist(
        [{"row": row, "prompt": [{"role": "user", "content": str(row // 2)}]} for row in range(20)]
    )
    preferences = published(store, "raw_preferences", "preferences.parquet", said, "a")
    candidate = evaluated(store, "sigmoid", "b", rows=scored([-4.0] * 10 + [-2.0] * 10, [-5.0] * 10 + [-3.0] * 10))
    champion = evaluated(store, "simpo", "a", rows=scored([-2.0] * 10 + [-4.0] * 10, [-3.0] * 10 + [-5.0] * 10))
    version = Version("small", 1, "", lineage_tags({"evaluation": champion.fingerprint}))
    step = cast(AssetContext, SimpleNamespace(services=SimpleNamespace(store=store)))
    found = compared(step, candidate, preferences.fingerprint, version)
    assert found.measure == Measure.ERROR_RATE_OVER_CHAMPIONS_REFERENCE
    names = [f"c{row}r{row}" for row in range(20)]
    assert [found.candidate[name] for name in names] == [1.0] * 10 + [0.0] * 10
    assert [found.champion[name] for name in names] == [0.0] * 20
    of_prompts = [found.prompts[name] for name in names]
    assert of_prompts[::2] == of_prompts[1::2] and len(set(of_prompts)) == 10


@pytest.mark.parametrize(
    ("spared", "prompts", "gone", "compared_pairs"),
    [
        *((12, 30, False, 30), (14, 30, False, 30), (15, 30, False, 15), (30, 30, False, 30)),
        *((15, 9, False, 30), (12, 30, True, 12)),
    ],
)
def test_the_few_pairs_that_an_edit_spared_do_not_decide_alone(
    tmp_path: Path, spared: int, prompts: int, gone: bool, compared_pairs: int
):
    """Of thirty pairs so many have the same tokens in both. These alone count where they are half of them, of ten prompts; and
    where the messages of the champion's pairs are nowhere."""
    store = Store(tmp_path / "store")
    said = pa.Table.from_pylist(
        [
            {
                "row": row,
                "prompt": [{"role": "user", "content": str(row % prompts)}],
                "chosen": str(row),
                "split": "validation",
            }
            for row in range(30)
        ]
    )
    preferences = published(store, "raw_preferences", "preferences.parquet", said, "a")
    theirs, ours = scored([-2.0] * 30, [-3.0] * 30), scored([-2.0] * 30, [-3.0] * 30)
    for row in ours[spared:]:
        row["chosen_key"] += "in another template"
    candidate, champion = (
        evaluated(store, "sigmoid", "a", pairs, rows=rows) for pairs, rows in (("c", ours), ("d", theirs))
    )
    tags = {"evaluation": champion.fingerprint} | ({} if gone else {"raw_preferences": preferences.fingerprint})
    step = cast(AssetContext, SimpleNamespace(services=SimpleNamespace(store=store)))
    found = compared(step, candidate, preferences.fingerprint, Version("small", 1, "", lineage_tags(tags)))
    assert len(found.shared) == compared_pairs
    assert found.measure == (Measure.LOSS if spared == compared_pairs else Measure.ERROR_RATE)


def test_how_pairs_are_ranked_is_told_over_the_reference_for_losses_without_one_too(tmp_path: Path):
    """By its own rewards, its log-probs, a model that is its reference ranks all pairs rightly. Over it, it ranks none so."""
    store = Store(tmp_path / "store")
    said = pa.Table.from_pylist([{"row": row, "prompt": str(row)} for row in range(10)])
    preferences = published(store, "raw_preferences", "preferences.parquet", said, "a")
    untrained = [row | {"margin": 2.0} for row in scored([2.0] * 10, [2.0] * 10)]
    candidate = evaluated(store, "cpo", "a", rows=untrained)
    champion = evaluated(store, "sigmoid", "a", rows=scored([3.0] * 9 + [1.0], [2.0] * 10))
    step = cast(AssetContext, SimpleNamespace(services=SimpleNamespace(store=store)))
    version = Version("small", 1, "", lineage_tags({"evaluation": champion.fingerprint}))
    found = compared(step, candidate, preferences.fingerprint, version)
    assert found.measure == Measure.ERROR_RATE
    assert (sum(found.candidate.values()), sum(found.champion.values())) == (10, 1)


def test_a_server_that_is_away_is_waited_for_and_not_taken_for_another_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The champion's evaluation is to be fetched from it, where nobody answers now."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    store, registry = Store(tmp_path / "store"), Registry("http://127.0.0.1:9", tmp_path / "downloads")
    step = cast(AssetContext, SimpleNamespace(services=SimpleNamespace(store=store, registry=registry)))
    evaluation = evaluated(store, "sigmoid", "a", rows=scored([-4.0], [-5.0]))
    tags = lineage_tags({"evaluation": "e" * 64})
    with pytest.raises(RegistryUnavailable):
        compared(step, evaluation, "", Version("small", 1, "mlflow-artifacts:/1/run/artifacts/policy", tags))
