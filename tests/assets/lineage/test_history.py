"""What Dagster is asked, against what it answers to its own question for a single asset."""

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
from training.contract.store.manifest import Derivation
from training.contract.store.store import JobResult, Store
from workflows.recipes.discovery import load_recipe


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """Of a pipeline whose assets were materialized twice, but for the last; and of another pipeline's in the same instance."""
    pipeline = load_recipe(write_recipe(tmp_path / "small", ATTRIBUTES)).pipeline
    with dg.DagsterInstance.ephemeral() as instance:
        for version in (1, 2):
            for asset in list(GRAPH)[:-1]:
                for key in (pipeline.key(asset), dg.AssetKey(["other", asset])):
                    tags = {"dagster/data_version": f"{key.to_user_string()} {version}"}
                    instance.report_runless_asset_event(
                        dg.AssetMaterialization(key, metadata={"key": version}, tags=tags)
                    )
        yield History(instance, pipeline, Store(tmp_path / "store"))


def test_another_artifact_than_the_latest_was_made_as_its_own_manifest_says(history: History):
    """The latest is made in a way that came later than its manifest's: of the two it is the way of now."""
    ways = [Derivation(kind="policy", code_version=version, inputs={}, settings={}) for version in "123"]
    for way, fingerprint in zip(ways, ("a" * 64, "b" * 64, "b" * 64), strict=True):
        with history.store.staging() as staging:
            history.store.publish(staging, way, JobResult(fingerprint))
    key, tags = history.pipeline.key("policy"), {"dagster/data_version": "b" * 64}
    history.instance.report_runless_asset_event(dg.AssetMaterialization(key, metadata={"key": ways[2].key}, tags=tags))
    assert [history.derivation("policy", found * 64) for found in "ab"] == [ways[0], ways[2]]


@contextmanager
def questions(table: str) -> Iterator[list[str]]:
    """The statements that ask the table, of whatever database, within the block."""
    asked: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if f"FROM {table}" in statement:
            asked.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_all_assets_of_a_pipeline_cost_one_question(history: History):
    """Each costs a dozen connections: a status asked 12 times, and a comparison of 100 variants 2,400 times."""
    with questions("asset_keys") as asked:
        found = {asset: history.latest(asset) for asset in GRAPH}
    assert len(asked) == 1
    *made, last = GRAPH
    for asset in made:
        recorded = history.instance.get_latest_materialization_event(history.pipeline.key(asset))
        assert found[asset] == Materialization.of(recorded.asset_materialization)
        assert (found[asset].fingerprint, found[asset].key) == (f"small/{asset} 2", 2)
    assert found[last] == Materialization()


SECTIONS: list[dict[str, Any]] = [
    {},
    {"reference": {**ATTRIBUTES["reference"], "sft": {"epochs": 1}}},
    {"data": {"sources": [{"path": "preferences.jsonl", "name": "all"}]}},
]


def test_a_step_can_ask_of_all_ancestors_of_its_inputs(tmp_path: Path):
    """It reads no other records. The latest of its inputs may come from a recipe that had tuning, or names of sources."""
    recipes = [
        load_recipe(write_recipe(tmp_path / str(number), {**ATTRIBUTES, **sections})).pipeline.recipe
        for number, sections in enumerate(SECTIONS)
    ]
    assert len({len(with_upstream(recipe, "reference_model")) for recipe in recipes}) == 2
    for now, before in itertools.product(recipes, recipes):
        for asset, node in GRAPH.items():
            known = set(with_upstream(now, asset))
            for name in node.inputs(now):
                assert known.issuperset(with_upstream(before, name)), (asset, name)
