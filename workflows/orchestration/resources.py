"""Where Pedigree keeps its things, and the services built on that place.

Nothing is read from the environment when definitions are imported: a run asks when it starts.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
from sqlalchemy.exc import DatabaseError
from yaml import YAMLError

from assets.execution.run_liveness import sign
from assets.pipeline.pipeline import Listener, Services, ignore
from model_registry.registry import Registry
from model_registry.relocate import relocate_artifacts
from model_registry.tracking import Tracker, artifact_root, check_database_folder, registry_uri, tracking_uri
from training.contract.errors import StoreError
from training.contract.files.hub import pin_hub_revisions
from training.contract.identity.fingerprint import check_text
from training.contract.store.store import Store
from training.contract.system.atomic_io import make_group_writable, write_durably
from training.contract.system.locks import locked
from training.launch.conductor import NodesLauncher
from training.launch.nodes_file import NODES_FILE

_DAGSTER_YAML = """\
telemetry: {enabled: false}
nux: {enabled: false}
concurrency:
  pools: {granularity: op, default_limit: 1}
# What a run has to say is in its event log and in the logs of its jobs; Dagster's process itself prints nothing.
compute_logs: {module: dagster._core.storage.noop_compute_log_manager, class: NoOpComputeLogManager}
run_monitoring:
  enabled: true
  free_slots_after_run_end_seconds: 30
"""


def pedigree_home() -> Path:
    """The folder that holds store, jobs, and Dagster's and MLflow's records: PEDIGREE_HOME, or .pedigree right here.

    Raises UsageError where its path is not text.
    """
    home = Path(os.environ.get("PEDIGREE_HOME") or ".pedigree").absolute()
    check_text(home)
    return home


def prepare_home(home: Path) -> None:
    """Make `home` usable by this process and those it starts: absolute, and Dagster's unless DAGSTER_HOME says another.

    Raises StoreError where nothing can be written, UsageError where the databases in it would lie elsewhere.
    """
    check_database_folder(home, "PEDIGREE_HOME")
    os.environ["PEDIGREE_HOME"] = str(home)
    dagster_home = Path(os.environ.get("DAGSTER_HOME") or home / "dagster").expanduser().absolute()
    check_database_folder(dagster_home, "DAGSTER_HOME")
    os.environ["DAGSTER_HOME"] = str(dagster_home)
    try:
        for folder in (home, dagster_home):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        if not (dagster_home / "dagster.yaml").exists():
            write_durably(dagster_home / "dagster.yaml", _DAGSTER_YAML.encode())
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be used: {error.strerror or error}; set PEDIGREE_HOME (and DAGSTER_HOME, if you use it) to a "
            "folder you may write to"
        ) from error


@contextmanager
def dagster_instance() -> Iterator[dg.DagsterInstance]:
    """Dagster's instance for a while, in a home that is made if it is not there; its files are the group's as others are.

    One process at a time: two that make the tables of a new home together leave a database that nobody can open again.
    Raises StoreError where nothing can be written, the home's dagster.yaml is none, or the storage it names is not there.
    """
    prepare_home(pedigree_home())
    home = Path(os.environ["DAGSTER_HOME"])
    lock = home / "instance.lock"
    with locked(lock):
        try:
            opened = dg.DagsterInstance.get()
        except (dg.DagsterInvalidConfigError, YAMLError) as error:
            raise StoreError(
                f"{home / 'dagster.yaml'} is no configuration of Dagster: {_mistakes(error)}; correct it, or remove it: "
                "the next command writes another"
            ) from error
        except (DatabaseError, OSError):  # which file, and how much room there is, is told where commands end
            raise
        except Exception as error:  # each storage that a dagster.yaml may name has errors of its own
            raise StoreError(
                f"Dagster's records cannot be opened as {home / 'dagster.yaml'} says: {_root_of(error)}"
            ) from error
        make_group_writable(home.rglob("*.db*"), lock)
    with opened as instance:
        try:
            yield instance
        finally:
            make_group_writable(home.rglob("*.db*"), lock)


def _root_of(error: BaseException) -> str:
    """The first line of what is behind it: Dagster's storage in Postgres says only that it tried too often."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _mistakes(error: dg.DagsterInvalidConfigError | YAMLError) -> str:
    """Without the list of everything that Dagster takes, which fills a page."""
    if isinstance(error, dg.DagsterInvalidConfigError):
        return " ".join(each.message.partition(". Expected:")[0] for each in error.errors)
    return str(error)


def build_services(home: Path, listener: Listener = ignore) -> Services:
    address = tracking_uri(home, os.environ)
    if address == tracking_uri(home, {}):
        relocate_artifacts(Path(address.removeprefix("sqlite:///")), artifact_root(home))
    return Services(
        home=home,
        store=Store(home / "store"),
        launcher=NodesLauncher(home / NODES_FILE),
        tracker=Tracker(address, artifact_root(home)),
        registry=Registry(address, home / "mlflow" / "downloads", registry_uri(home, os.environ)),
        listener=listener,
    )


@dg.resource(description="Store, launcher, tracker and registry under PEDIGREE_HOME.")
def services(context: dg.InitResourceContext) -> Iterator[Services]:
    """The run is signed before its first step, which may wait for hours for a slot in a pool.

    And all its steps are of one state of the hub: a branch that moves meanwhile is for the next run.
    """
    home = pedigree_home()
    if context.instance is not None and context.run is not None:
        sign(context.instance, context.run, home)
    with pin_hub_revisions():
        yield build_services(home)
