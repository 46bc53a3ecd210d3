"""Pairing of two evaluations. Oracle: hand-written rows, also in the form of earlier versions."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assets.comparison.champion import score_against_champion
from assets.comparison.paired_metrics import common_measure, rows_by_messages, rows_by_pair
from assets.execution.asset_context import AssetContext
from model_registry.gate.scores import GateMetric
from model_registry.model_version import Version, lineage_tags
from model_registry.registry import Registry
from training.contract.errors import RegistryUnavailable
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.manifest import Derivation, Source
from training.contract.store.store import Store

MESSAGE = [("role", pa.string()), ("content", pa.string())]
CALLS = [*MESSAGE, ("tool_calls", pa.string()), ("tool_call_id", pa.string()), ("name", pa.string())]


def publish(store: Store, kind: str, file: str, table: pa.Table, key: str) -> Artifact[Any]:
    with store.staging() as staging:
        pq.write_table(table, staging / file)
        derivation = Derivation(kind=kind, code_version="1", inputs={}, settings={"key": key})
        return store.publish(staging, derivation, JobResult(key * 64))


def preferences(store: Store, key: str, message: list[tuple[str, pa.DataType]], *further: str) -> Artifact[Any]:
    """Publish rows 0 and 1, with or without newer columns."""
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
    table = pa.Table.from_pylist(rows, pa.schema(columns))
    return publish(store, "raw_preferences", "preferences.parquet", table, key)


def test_rows_by_messages_ignores_newer_columns(tmp_path: Path):
    store = Store(tmp_path / "store")
    old = preferences(store, "a", MESSAGE)
    new = preferences(store, "b", CALLS, "tools", "source_name", "identity")
    evaluation = publish(store, "evaluation", "pairs.parquet", pa.table({"row": [1], "margin": [0.5]}), "c")
    old_rows, new_rows = (rows_by_messages(evaluation, artifact) for artifact in (old, new))
    assert old_rows == new_rows and list(old_rows.values()) == [{"row": 1, "margin": 0.5}]


def test_rows_by_pair_with_a_source_returns_only_its_pairs(tmp_path: Path):
    """The pair a-b is in both sources. An older table lacks the column, so a named source matches nothing."""
    rows = [
        {"chosen_key": chosen, "rejected_key": rejected, "source_name": name}
        for chosen, rejected, name in (("a", "b", "old"), ("c", "d", "old"), ("e", "f", None), ("a", "b", "new"))
    ]
    store = Store(tmp_path / "store")
    table = pa.Table.from_pylist(rows)
    named = publish(store, "evaluation", "pairs.parquet", table, "a")
    unnamed = publish(store, "evaluation", "pairs.parquet", table.drop_columns("source_name"), "b")
    by_source = {name: set(rows_by_pair(named, name)) for name in (None, "old", "new", "other")}
    assert by_source == {None: {"ab", "cd", "ef"}, "old": {"ab", "cd"}, "new": {"ab"}, "other": set()}
    assert set(rows_by_pair(unnamed)) == {"ab", "cd", "ef"} and not rows_by_pair(unnamed, "old")


def evaluated(
    store: Store,
    loss: str,
    reference: str,
    pairs: str = "c",
    weighting: str | None = None,
    *,
    rows: Sequence[dict[str, Any]] = (),
) -> Artifact[Any]:
    """Publish an evaluation made from a reference and pairs with these fingerprints."""
    inputs = {
        kind: Source(kind=kind, fingerprint=digit * 64)
        for kind, digit in (("reference_model", reference), ("tokenized_pairs", pairs), ("policy", "e"))
    }
    settings = {"loss": {"type": loss, "weighting": weighting}}
    derivation = Derivation(kind="evaluation", code_version="1", inputs=inputs, settings=settings)
    with store.staging() as staging:
        pq.write_table(pa.Table.from_pylist(list(rows)), staging / "pairs.parquet")
        return store.publish(staging, derivation, JobResult(derivation.key))


# SimPO never uses the recipe's reference. AOT sorts the pairs of a batch, so a loss depends on all of them.
MEASURES = {
    "all the same": (("sigmoid", "a"), ("sigmoid", "a"), GateMetric.LOSS),
    "other pairs beside": (("sigmoid", "a", "c"), ("sigmoid", "a", "d"), GateMetric.LOSS),
    "other pairs beside, which count": (("aot", "a", "c"), ("aot", "a", "d"), GateMetric.ERROR_RATE),
    "another weighting of the pairs in training": (("sigmoid", "a", "c", "wpo"), ("sigmoid", "a"), GateMetric.LOSS),
    "another loss": (("hinge", "a"), ("sigmoid", "a"), GateMetric.ERROR_RATE),
    "another reference": (("sigmoid", "b"), ("sigmoid", "a"), GateMetric.ERROR_RATE_OVER_CHAMPIONS_REFERENCE),
    "another reference, which neither has": (("simpo", "b"), ("simpo", "a"), GateMetric.LOSS),
    "another reference, which the candidate lacks": (
        *(("simpo", "b"), ("sigmoid", "a"), GateMetric.ERROR_RATE_OVER_CHAMPIONS_REFERENCE),
    ),
    "the reference that the champion lacks": (("sigmoid", "a"), ("simpo", "a"), GateMetric.ERROR_RATE),
    "another reference, which the champion lacks": (
        *(("sigmoid", "b"), ("simpo", "a"), GateMetric.ERROR_RATE_OVER_CHAMPIONS_REFERENCE),
    ),
}


@pytest.mark.parametrize(("candidate", "champion", "measure"), MEASURES.values(), ids=MEASURES)
def test_common_measure_depends_on_loss_and_reference(
    tmp_path: Path, candidate: tuple[str, ...], champion: tuple[str, ...], measure: GateMetric
):
    one, other = (evaluated(Store(tmp_path / "store"), *arguments) for arguments in (candidate, champion))
    assert common_measure(one, other) == measure


def scored(chosen: Sequence[float], reference: Sequence[float]) -> list[dict[str, Any]]:
    """Return pairs with these log-probs of the chosen responses; rejected responses have the log-prob 0 under both models."""
    return [
        {
            "row": row, "chosen_key": f"c{row}", "rejected_key": f"r{row}", "margin": policy - frozen, "loss": 0.5,
            "policy_chosen_logprob": policy, "policy_rejected_logprob": 0.0,
            "reference_chosen_logprob": frozen, "reference_rejected_logprob": 0.0,
        }
        for row, (policy, frozen) in enumerate(zip(chosen, reference, strict=True))
    ]  # fmt: skip


def test_compared_with_different_references_uses_the_champions(tmp_path: Path):
    """In the first ten pairs, the candidate's -4 is correct over its own reference (-5), but wrong over the champion's (-3).

    In the other ten, the champion's -4 is correct over its reference (-5), but would be wrong over the candidate's (-3). Two
    pairs share a prompt. The champion's loss does not use the reference of its recipe, but the comparison does.
    """
    store = Store(tmp_path / "store")
    prompts = [{"row": row, "prompt": [{"role": "user", "content": str(row // 2)}]} for row in range(20)]
    table = pa.Table.from_pylist(prompts)
    preferences = publish(store, "raw_preferences", "preferences.parquet", table, "a")
    candidate = evaluated(store, "sigmoid", "b", rows=scored([-4.0] * 10 + [-2.0] * 10, [-5.0] * 10 + [-3.0] * 10))
    champion = evaluated(store, "simpo", "a", rows=scored([-2.0] * 10 + [-4.0] * 10, [-3.0] * 10 + [-5.0] * 10))
    version = Version("small", 1, "", lineage_tags({"evaluation": champion.fingerprint}))
    step = cast(AssetContext, SimpleNamespace(services=SimpleNamespace(store=store)))
    scores = score_against_champion(step, candidate, preferences.fingerprint, version)
    assert scores.measure == GateMetric.ERROR_RATE_OVER_CHAMPIONS_REFERENCE
    names = [f"c{row}r{row}" for row in range(20)]
    assert [scores.candidate[name] for name in names] == [1.0] * 10 + [0.0] * 10
    assert [scores.champion[name] for name in names] == [0.0] * 20
    digests = [scores.prompts[name] for name in names]
    assert digests[::2] == digests[1::2] and len(set(digests)) == 10


@pytest.mark.parametrize(
    ("equal_pairs", "prompts", "data_missing", "compared_pairs"),
    [
        *((12, 30, False, 30), (14, 30, False, 30), (15, 30, False, 15), (30, 30, False, 30)),
        *((15, 9, False, 30), (12, 30, True, 12)),
    ],
)
def test_compared_with_few_equal_tokens_pairs_by_messages(
    tmp_path: Path, equal_pairs: int, prompts: int, data_missing: bool, compared_pairs: int
):
    """`equal_pairs` of thirty pairs have the same tokens in both evaluations.

    They suffice if they are at least half of the pairs, with ten prompts, or if the champion's data are missing.
    """
    store = Store(tmp_path / "store")
    table = pa.Table.from_pylist(
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
    preferences = publish(store, "raw_preferences", "preferences.parquet", table, "a")
    candidate_rows, champion_rows = scored([-2.0] * 30, [-3.0] * 30), scored([-2.0] * 30, [-3.0] * 30)
    for row in candidate_rows[equal_pairs:]:
        row["chosen_key"] += "in another template"
    candidate = evaluated(store, "sigmoid", "a", "c", rows=candidate_rows)
    champion = evaluated(store, "sigmoid", "a", "d", rows=champion_rows)
    tags = {"evaluation": champion.fingerprint} | ({} if data_missing else {"raw_preferences": preferences.fingerprint})
    step = cast(AssetContext, SimpleNamespace(services=SimpleNamespace(store=store)))
    scores = score_against_champion(
        step, candidate, preferences.fingerprint, Version("small", 1, "", lineage_tags(tags))
    )
    assert len(scores.shared) == compared_pairs
    assert scores.measure == (GateMetric.LOSS if equal_pairs == compared_pairs else GateMetric.ERROR_RATE)


def test_compared_with_a_loss_without_reference_ranks_over_the_reference(tmp_path: Path):
    """An untrained policy ranks all pairs correctly by its log-probs, its rewards under CPO, but none over its reference."""
    store = Store(tmp_path / "store")
    table = pa.Table.from_pylist([{"row": row, "prompt": str(row)} for row in range(10)])
    preferences = publish(store, "raw_preferences", "preferences.parquet", table, "a")
    untrained = [row | {"margin": 2.0} for row in scored([2.0] * 10, [2.0] * 10)]
    candidate = evaluated(store, "cpo", "a", rows=untrained)
    champion = evaluated(store, "sigmoid", "a", rows=scored([3.0] * 9 + [1.0], [2.0] * 10))
    step = cast(AssetContext, SimpleNamespace(services=SimpleNamespace(store=store)))
    version = Version("small", 1, "", lineage_tags({"evaluation": champion.fingerprint}))
    scores = score_against_champion(step, candidate, preferences.fingerprint, version)
    assert scores.measure == GateMetric.ERROR_RATE
    assert (sum(scores.candidate.values()), sum(scores.champion.values())) == (10, 1)


def test_compared_with_an_unavailable_server_raises_registry_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run can then wait for the server. A missing artifact of another home is a different error."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    store, registry = Store(tmp_path / "store"), Registry("http://127.0.0.1:9", tmp_path / "downloads")
    step = cast(AssetContext, SimpleNamespace(services=SimpleNamespace(store=store, registry=registry)))
    evaluation = evaluated(store, "sigmoid", "a", rows=scored([-4.0], [-5.0]))
    tags = lineage_tags({"evaluation": "e" * 64})
    with pytest.raises(RegistryUnavailable):
        score_against_champion(
            step, evaluation, "", Version("small", 1, "mlflow-artifacts:/1/run/artifacts/policy", tags)
        )
