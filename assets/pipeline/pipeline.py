"""A recipe with its name, and the services for its runs: store, engine, tracker and registry."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import dagster as dg

from model_registry.registry import Registry
from model_registry.tracking import Tracker
from training.contract.config.recipe import Recipe
from training.contract.identity.hash_cache import HashCache
from training.contract.protocol.events import Event, make_event
from training.contract.store.store import Store
from training.contract.system.progress import Emit
from training.launch.engine import Engine


@dataclass(frozen=True)
class Pipeline:
    """A recipe with absolute local paths, or a variant of it.

    `family`: the name of the recipe's folder. `file`: the path of its `defs.yaml`. `is_named`: commands find it by name alone.
    """

    family: str
    recipe: Recipe
    file: Path
    variant: str | None = None
    is_named: bool = False

    @property
    def name(self) -> str:
        """The first part of its asset keys."""
        return self.family if self.variant is None else f"{self.family}-{self.variant}"

    @property
    def argument(self) -> str:
        """Its name on the command line."""
        recipe = self.family if self.is_named else str(self.file.parent)
        return recipe if self.variant is None else f"{recipe}/{self.variant}"

    @property
    def identifier(self) -> str:
        return identifier(self.name)

    def key(self, asset: str) -> dg.AssetKey:
        return dg.AssetKey([self.name, str(asset)])


def identifier(name: str) -> str:
    """Return a pipeline's name for use in names of Dagster's jobs, schedules and sensors: hyphens are not allowed there."""
    return name.replace("-", "_")


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Ignore `event`."""


def emitting(listener: Listener, asset: str) -> Emit:
    """Return an `Emit` for work in this process. It passes events to `listener`, as a job writes them into its file."""
    return lambda event, **fields: listener(make_event(event, asset=asset, **fields))


@dataclass(frozen=True)
class Services:
    """The services of a run.

    `listener`: receives every event of every job, in addition to Dagster's log; the command line draws progress bars.
    `is_command`: a command of the user does the work. If it is interrupted, its run counts as stopped by the user.
    `is_canceled`: whether an interruption also ends the live job in the queue of an engine.
    """

    home: Path
    store: Store
    engine: Engine
    tracker: Tracker
    registry: Registry
    listener: Listener = ignore
    is_command: bool = False
    is_canceled: Callable[[], bool] = lambda: True

    @cached_property
    def hashes(self) -> HashCache:
        """A cache of file hashes, for frequent comparisons. Never use it for recorded or computed results."""
        return HashCache(self.home / "hashes.json")
