"""Records of materializations. Oracle: Dagster's own query for a single asset."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from sqlalchemy import Engine, event

from assets.lineage.history import History, Materialization
from assets.pipeline.graph import GRAPH, with_upstream
from tests.workflows.homes import ATTRIBUTES, write_recipe
from training.contract.store.artifact import JobResult
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store
from workflows.recipes.discovery import load_recipe


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """A pipeline with all assets but the last materialized twice, in an instance with another pipeline."""
    pipeline = load_recipe(write_recipe(tmp_path / "small", ATTRIBUTES)).pipeline
    with dg.DagsterInstance.ephemeral() as instance:
        for version in (1, 2):
            for asset in list(GRAPH)[:-1]:
                for key in (pipeline.key(asset), dg.AssetKey(["other", str(asset)])):
                    tags = {"dagster/data_version": f"{key.to_user_string()} {version}"}
                    instance.report_runless_asset_event(
                        dg.AssetMaterialization(key, metadata={"key": version}, tags=tags)
                    )
        yield History(instance, pipeline, Store(tmp_path / "store"))


def test_derivation_of_an_older_artifact_is_its_manifests(history: History):
    """The latest artifact has two derivations. Its latest one counts, not the one in its manifest."""
    derivations = [Derivation(kind="policy", code_version=version, inputs={}, settings={}) for version in "123"]
    for derivation, fingerprint in zip(derivations, ("a" * 64, "b" * 64, "b" * 64), strict=True):
        with history.store.staging() as staging:
            history.store.publish(staging, derivation, JobResult(fingerprint))
    key, tags = history.pipeline.key("policy"), {"dagster/data_version": "b" * 64}
    metadata = {"key": derivations[2].key}
    history.instance.report_runless_asset_event(dg.AssetMaterialization(key, metadata=metadata, tags=tags))
    assert [history.derivation("policy", digit * 64) for digit in "ab"] == [derivations[0], derivations[2]]


@contextmanager
def record_queries(table: str) -> Iterator[list[str]]:
    """Record the statements of the block that query the table, in any database."""
    statements: list[str] = []

    def record(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if f"FROM {table}" in statement:
            statements.append(statement)

    event.listen(Engine, "before_cursor_execute", record)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", record)


def test_latest_of_all_assets_takes_one_query(history: History):
    """Each query takes a dozen connections. With one per asset, a comparison of 100 variants made 2,400."""
    with record_queries("asset_keys") as queries:
        latest = {asset: history.latest(asset) for asset in GRAPH}
    assert len(queries) == 1
    *materialized, last = GRAPH
    for asset in materialized:
        record = history.instance.get_latest_materialization_event(history.pipeline.key(asset))
        assert latest[asset] == Materialization.of(record.asset_materialization)
        assert (latest[asset].fingerprint, latest[asset].key) == (f"small/{asset} 2", 2)
    assert latest[last] == Materialization()


SECTIONS: list[dict[str, Any]] = [
    {},
    {"reference": {**ATTRIBUTES["reference"], "sft": {"epochs": 1}}},
    {"data": {"sources": [{"path": "preferences.jsonl", "name": "all"}]}},
]


def test_with_upstream_includes_ancestors_under_earlier_recipes(tmp_path: Path):
    """A step reads records of these assets only. Its inputs may come from an earlier recipe with tuning or named sources."""
    recipes = [
        load_recipe(write_recipe(tmp_path / str(number), {**ATTRIBUTES, **sections})).pipeline.recipe
        for number, sections in enumerate(SECTIONS)
    ]
    assert len({len(with_upstream(recipe, "reference_model")) for recipe in recipes}) == 2
    for now, before in itertools.product(recipes, recipes):
        for asset, node in GRAPH.items():
            upstream = set(with_upstream(now, asset))
            for name in node.inputs(now):
                assert upstream.issuperset(with_upstream(before, name)), (asset, name)
