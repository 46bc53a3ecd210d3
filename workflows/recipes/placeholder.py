"""Placeholder definitions in Dagster for an invalid or missing recipe, so other recipes still run.

Every run loads the whole code location: without this, an error in one recipe would fail the runs of all. The invalid recipe
keeps its assets and jobs by name. These fail with file, line and field of the error, and so does its sensor at each tick. Its
variants and its schedule are unknown.
"""

import dagster as dg

from assets.pipeline.graph import GRAPH, STAGE_TAG
from assets.pipeline.pipeline import identifier
from training.contract.errors import RecipeError, UsageError

_SECONDS_BETWEEN_TICKS = 60


def placeholder_definitions(recipe: str, fault: UsageError) -> dg.Definitions:
    """Return definitions for the recipe `recipe`, which failed to load with `fault`."""
    # A file name with invalid UTF-8 would break the pages of all recipes.
    name, message = identifier(recipe), str(fault).encode(errors="backslashreplace").decode()
    assets = [_failing_asset(recipe, asset, message) for asset in GRAPH]
    jobs = [dg.define_asset_job(f"{name}_{job}", selection=assets) for job in ("retrain", "look")]

    @dg.sensor(
        name=f"{name}_data_sensor",
        job=jobs[0],
        minimum_interval_seconds=_SECONDS_BETWEEN_TICKS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=message,
    )
    def failing_sensor() -> None:
        raise RecipeError(message)

    return dg.Definitions(assets=assets, jobs=jobs, sensors=[failing_sensor])


def _failing_asset(recipe: str, asset: str, fault: str) -> dg.AssetsDefinition:
    node = GRAPH[asset]

    @dg.asset(
        key=[recipe, asset],
        deps=[[recipe, need] for need in (*node.needs, *node.after)],
        group_name=identifier(recipe),
        tags={STAGE_TAG: node.stage},
        description=f"The recipe cannot be loaded: {fault}",
    )
    def fail() -> None:
        raise RecipeError(fault)

    return fail
