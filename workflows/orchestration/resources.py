"""The home of Pedigree, and the services on it.

The environment is read when a run starts, not when definitions are imported.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
from dagster._config import ConfigType, Field, Shape
from dagster._core.definitions.definition_config_schema import IDefinitionConfigSchema
from dagster._core.definitions.job_definition import default_job_io_manager
from sqlalchemy.exc import DatabaseError
from yaml import YAMLError

from assets.execution.run_liveness import tag_run_with_process
from assets.pipeline.pipeline import Listener, Services, ignore
from model_registry.client.relocate import relocate_artifacts
from model_registry.registry import Registry
from model_registry.tracking import Tracker, artifact_root, check_database_folder, registry_uri, tracking_uri
from training.contract.errors import StoreError
from training.contract.files.hub import pin_hub_revisions
from training.contract.identity.fingerprint import check_text
from training.contract.store.store import Store
from training.contract.system.atomic_io import make_group_writable, write_durably
from training.contract.system.locks import locked
from training.launch.cluster.configured import ConfiguredEngine
from workflows.orchestration.gpu_slots import set_gpu_slots

_DAGSTER_YAML = """\
telemetry: {enabled: false}
nux: {enabled: false}
concurrency:
  pools: {granularity: op, default_limit: 1}
# A run reports to its event log and the logs of its jobs; Dagster's process itself prints nothing.
compute_logs: {module: dagster._core.storage.noop_compute_log_manager, class: NoOpComputeLogManager}
run_monitoring:
  enabled: true
  free_slots_after_run_end_seconds: 30
freshness: {enabled: true}
"""
# The file as earlier versions wrote it. The user has not changed it, so it is replaced.
_EARLIER_DAGSTER_YAML = _DAGSTER_YAML.replace("freshness: {enabled: true}\n", "")


def pedigree_home() -> Path:
    """Return the folder with store, jobs, and Dagster's and MLflow's records: PEDIGREE_HOME, or .pedigree in the working
    directory.

    Raises UsageError if its path is not text.
    """
    home = Path(os.environ.get("PEDIGREE_HOME") or ".pedigree").absolute()
    check_text(home)
    return home


def prepare_home(home: Path) -> None:
    """Make `home` usable for this process and its children, also as Dagster's home unless DAGSTER_HOME is set.

    Raises StoreError if it is not writable, UsageError if its path would change the addresses of databases.
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
        written = dagster_home / "dagster.yaml"
        if not written.exists() or written.read_bytes() == _EARLIER_DAGSTER_YAML.encode():
            write_durably(written, _DAGSTER_YAML.encode())
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be used: {error.strerror or error}; set PEDIGREE_HOME (and DAGSTER_HOME, if you use it) to a "
            "writable folder",
            "unusable-home",
        ) from error


@contextmanager
def dagster_instance() -> Iterator[dg.DagsterInstance]:
    """Yield Dagster's instance, in a home that is made if missing. Its files get the group's permissions, as other files do.

    Open it under a lock: two processes making the tables of a new home at once leave an unusable database. Raises StoreError
    if it is not writable, dagster.yaml is invalid, or its storage is missing.
    """
    prepare_home(pedigree_home())
    home = Path(os.environ["DAGSTER_HOME"])
    lock = home / "instance.lock"
    with locked(lock):
        try:
            opened = dg.DagsterInstance.get()
        except (dg.DagsterInvalidConfigError, YAMLError) as error:
            raise StoreError(
                f"{home / 'dagster.yaml'} is not a configuration of Dagster: {_mistakes(error)}; correct it, or remove it: "
                "the next command writes another",
                "wrong-dagster-yaml",
            ) from error
        except (DatabaseError, OSError):  # the end of the command reports file and free space
            raise
        except Exception as error:  # each storage has its own errors
            raise StoreError(
                f"Dagster's records, configured in {home / 'dagster.yaml'}, cannot be opened: {_root_of(error)}",
                "dagster-storage",
            ) from error
        make_group_writable(home.rglob("*.db*"), lock)
    with opened as instance:
        set_gpu_slots(instance, pedigree_home())
        try:
            yield instance
        finally:
            make_group_writable(home.rglob("*.db*"), lock)


def _root_of(error: BaseException) -> str:
    """Return the first line of the root cause: Dagster's Postgres storage itself only reports too many attempts."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _mistakes(error: dg.DagsterInvalidConfigError | YAMLError) -> str:
    """Return the mistakes, without Dagster's page-long list of valid options."""
    if isinstance(error, dg.DagsterInvalidConfigError):
        return " ".join(mistake.message.partition(". Expected:")[0] for mistake in error.errors)
    return str(error)


def build_services(home: Path, listener: Listener = ignore) -> Services:
    address = tracking_uri(home, os.environ)
    if address == tracking_uri(home, {}):
        relocate_artifacts(Path(address.removeprefix("sqlite:///")), artifact_root(home))
    return Services(
        home=home,
        store=Store(home / "store"),
        engine=ConfiguredEngine(home),
        tracker=Tracker(address, artifact_root(home)),
        registry=Registry(address, home / "mlflow" / "downloads", registry_uri(home, os.environ)),
        listener=listener,
    )


class _NoSchema(IDefinitionConfigSchema):
    """Hides a resource in the launchpad: Dagster lists all resources with a schema, also those without any field."""

    def as_field(self) -> Field:
        return None  # type: ignore[return-value]  # Dagster takes it for a missing schema

    @property
    def config_type(self) -> ConfigType:
        """The type on the resource's own page."""
        return Shape({})  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        return False


def _services_of_run(context: dg.InitResourceContext) -> Iterator[Services]:
    """Yield the services of a run. Sign the run before its first step, which may wait hours for a slot in a pool.

    All steps use one state of the Hub: if a branch moves meanwhile, the next run takes it.
    """
    home = pedigree_home()
    if context.instance is not None and context.run is not None:
        tag_run_with_process(context.instance, context.run, home)
        set_gpu_slots(context.instance, home)
    with pin_hub_revisions():
        yield build_services(home)


services = dg.ResourceDefinition(
    _services_of_run, _NoSchema(), description="Store, engine, tracker and registry under PEDIGREE_HOME."
)
# Assets and checks from the user's Python files may pass values by Dagster's default.
io_manager = dg.IOManagerDefinition(default_job_io_manager.resource_fn, _NoSchema())
