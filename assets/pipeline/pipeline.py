"""A recipe under its name, and the services it is run with: they store, launch, track and register."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import dagster as dg

from model_registry.registry import Registry
from model_registry.tracking import Tracker
from training.contract.config.recipe import Recipe
from training.contract.identity.hash_cache import HashCache
from training.contract.protocol.events import Event
from training.contract.store.store import Store
from training.contract.system.progress import Emit
from training.launch.launcher import Launcher


@dataclass(frozen=True)
class Pipeline:
    """A recipe, its local paths absolute, or a variant of it; `family` is the name of the recipe's folder.

    `file` is where it is written, and `is_named` says whether the name alone leads there.
    """

    family: str
    recipe: Recipe
    file: Path
    variant: str | None = None
    is_named: bool = False

    @property
    def name(self) -> str:
        """What its asset keys begin with."""
        return self.family if self.variant is None else f"{self.family}-{self.variant}"

    @property
    def argument(self) -> str:
        """How the command line names it."""
        recipe = self.family if self.is_named else str(self.file.parent)
        return recipe if self.variant is None else f"{recipe}/{self.variant}"

    @property
    def identifier(self) -> str:
        return identifier(self.name)

    def key(self, asset: str) -> dg.AssetKey:
        return dg.AssetKey([self.name, asset])


def identifier(name: str) -> str:
    """The name of a pipeline as part of the names of Dagster's jobs, schedules and sensors, which allow no hyphens."""
    return name.replace("-", "_")


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """A listener that does nothing."""


def emitting(listener: Listener, asset: str) -> Emit:
    """An `Emit` by which work in this process tells `listener` what a job writes into its events."""
    return lambda event, **fields: listener({"event": event, "time": time.time(), "asset": asset, **fields})


@dataclass(frozen=True)
class Services:
    """`listener` hears every event of every job, in addition to Dagster's log: the command line draws progress bars.

    `is_command` says that a person's command does the work: if it is interrupted, its run counts as stopped by a person.
    """

    home: Path
    store: Store
    launcher: Launcher
    tracker: Tracker
    registry: Registry
    listener: Listener = ignore
    is_command: bool = False

    @cached_property
    def hashes(self) -> HashCache:
        """Hashes of files that were not written since: to look often, not to record or to compute."""
        return HashCache(self.home / "hashes.json")
