"""What Dagster shows of a recipe that cannot be loaded or is gone, so that those beside it go on.

Every run loads the whole code location: without this, a slip in one recipe of a folder would fail the runs of all of them.
The wrong one keeps its assets and jobs by name, which fail with file, line and field of what is wrong, as its sensor does at
each tick. Which variants and which schedule it has nobody can say.
"""

import dagster as dg

from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import identifier
from training.contract.errors import RecipeError, UsageError

_SECONDS_BETWEEN_TICKS = 60


def placeholder_definitions(recipe: str, fault: UsageError) -> dg.Definitions:
    """For the recipe of that name, which `fault` keeps from being loaded."""
    # Names of files may hold bytes that are no UTF-8, which would break the pages of all recipes.
    name, told = identifier(recipe), str(fault).encode(errors="backslashreplace").decode()
    assets = [_failing_asset(recipe, asset, told) for asset in GRAPH]
    jobs = [dg.define_asset_job(f"{name}_{job}", selection=assets) for job in ("retrain", "look")]

    @dg.sensor(
        name=f"{name}_data_sensor",
        job=jobs[0],
        minimum_interval_seconds=_SECONDS_BETWEEN_TICKS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=told,
    )
    def failing_sensor() -> None:
        raise RecipeError(told)

    return dg.Definitions(assets=assets, jobs=jobs, sensors=[failing_sensor])


def _failing_asset(recipe: str, asset: str, fault: str) -> dg.AssetsDefinition:
    node = GRAPH[asset]

    @dg.asset(
        key=[recipe, asset],
        deps=[[recipe, need] for need in node.needs],
        group_name=node.group,
        description=f"The recipe cannot be loaded: {fault}",
    )
    def fail() -> None:
        raise RecipeError(fault)

    return fail
