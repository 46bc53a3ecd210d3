"""What every asset's body stands on: the recipe under its name, and the services that store, launch, track and register."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from assets.conditions import ON_CONTENT
from assets.graph import GRAPH
from model_registry.registry import Registry
from model_registry.tracking import Tracker
from training.contract.events import Event
from training.contract.recipe import Recipe
from training.contract.store import Store
from training.launch.launcher import Launcher

OWNER = "team:preference-tuning"


@dataclass(frozen=True)
class Pipeline:
    """A recipe (its local paths absolute) under the name that begins its asset keys.

    `family` is the name of the recipe's folder, which a variant shares with the recipe that it is a variant of; `place` that
    folder, where the name alone does not lead to it.
    """

    family: str
    recipe: Recipe
    variant: str | None = None
    place: Path | None = None

    @property
    def name(self) -> str:
        return self.family if self.variant is None else f"{self.family}-{self.variant}"

    @property
    def argument(self) -> str:
        """What stands for it on the command line."""
        recipe = self.family if self.place is None else str(self.place)
        return recipe if self.variant is None else f"{recipe}/{self.variant}"

    @property
    def identifier(self) -> str:
        return identifier(self.name)

    def key(self, asset: str) -> dg.AssetKey:
        return dg.AssetKey([self.name, asset])


def identifier(name: str) -> str:
    """A pipeline's name as Dagster takes it for groups, jobs, schedules and sensors, which have no hyphens."""
    return name.replace("-", "_")


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of those who do not listen."""


@dataclass(frozen=True)
class Services:
    """`listener` hears every event of every job, beside the Dagster log: the command line's progress bars do."""

    home: Path
    store: Store
    launcher: Launcher
    tracker: Tracker
    registry: Registry
    listener: Listener = ignore


Body = Callable[..., dg.MaterializeResult]


def declare(
    pipeline: Pipeline, asset: str, checks: tuple[dg.AssetCheckSpec, ...] = ()
) -> Callable[[Body], dg.AssetsDefinition]:
    """Turn a body into the Dagster asset that `GRAPH` describes."""
    node = GRAPH[asset]
    arguments: dict[str, Any] = {
        "key": pipeline.key(asset),
        "deps": [pipeline.key(name) for name in node.needed_by(pipeline.recipe)],
        "group_name": pipeline.identifier,
        "tags": {"stage": node.stage},
        "kinds": set(node.kinds),
        "owners": [OWNER],
        "description": node.description,
        "code_version": node.code_version(pipeline.recipe),
        "check_specs": checks,
    }
    if pipeline.recipe.automation.on_change:
        arguments["automation_condition"] = ON_CONTENT
    if node.pool is not None:
        arguments["pool"] = node.pool
    decorator: Callable[[Body], dg.AssetsDefinition] = dg.asset(**arguments)
    return decorator
