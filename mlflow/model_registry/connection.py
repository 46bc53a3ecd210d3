"""The connection to MLflow: opened on first use, with short timeouts, so an outage does not block other work."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode, urlsplit, urlunsplit

from model_registry.client import mlflow_api
from model_registry.client.database import schema_lock, without_secrets
from model_registry.client.outages import is_away, is_corrupt, outage_text
from model_registry.client.records import ClientRecords, Records
from model_registry.client.settings import brief_patience
from model_registry.client.sqlite_records import sqlite_file, sqlite_records
from training.contract.errors import PedigreeError, RegistryError, RegistryUnavailable, code_of
from training.contract.system.atomic_io import make_group_writable
from training.contract.system.locks import locked

if TYPE_CHECKING:
    from mlflow import MlflowClient

_LONG_SECONDS = 1.0
DEFAULT_PAGE = "http://127.0.0.1:5000"
_RESTART_SECONDS = 60.0
_BETWEEN_ATTEMPTS = 1.0
_SQLITE = "sqlite:///"
CORRUPT_REMEDY = (
    "restore it from a backup, or move it away and run the same command: it records this recipe's run and releases its "
    "model as version 1 of a new registry"
)
TRACKING_VARIABLE, REGISTRY_VARIABLE = "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"
PAGES_VARIABLE = "PEDIGREE_MLFLOW_UI"  # the address of the web pages of a database
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Connection:
    """A tracking server or database, perhaps unavailable: then `asking` raises, and `try_request` calls `warn` and goes on.

    After a slow failure, all requests fail at once for the same time, so ten calls do not wait ten times. `failure` is the
    error of the last failed request.
    """

    def __init__(self, uri: str, warn: Callable[[str], None] = _LOG.warning) -> None:
        self.uri, self.warn = uri, warn
        self.failure: RegistryError | None = None
        self._away_until = 0.0
        self._warned: set[str] = set()

    @cached_property
    def client(self) -> "MlflowClient":
        return connect(self.uri)

    @contextlib.contextmanager
    def asking(self, what: str, patient: bool = False) -> "Iterator[MlflowClient]":
        """Yield the client, with short timeouts unless `patient`, as for transfers of files.

        Raises RegistryUnavailable if the server does not answer, else RegistryError: "MLflow cannot `what`".
        """
        with self.explaining(what), contextlib.nullcontext() if patient else brief_patience():
            yield self.client

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[Records]:
        """Yield the records, only to be read. Raises as `asking`."""
        with self.explaining(what), self._records() as records:
            yield records

    def try_request(self, what: str, work: "Callable[[MlflowClient], T]") -> T | None:
        """Return the result of `work`, done with short timeouts; None if it fails.

        Warn once for each `what`, until it succeeds again.
        """

        def request() -> T:
            with brief_patience():
                return work(self.client)

        return self._try(what, request)

    def try_reading(self, what: str, work: Callable[[Records], T]) -> T | None:
        """Return the result of `work`, which only reads records; None if it fails, as in `try_request`."""

        def read() -> T:
            with self._records() as records:
                return work(records)

        return self._try(what, read)

    @contextlib.contextmanager
    def _records(self) -> Iterator[Records]:
        with sqlite_records(self.uri) as found, brief_patience():
            yield found or ClientRecords(self.client)

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Raise what the block raises as `asking` does."""
        started = time.monotonic()
        try:
            yield
        except PedigreeError:
            raise
        except Exception as error:  # of MLflow, a database, the disk, or the client of a cloud
            failure = self._failure(what, error, time.monotonic() - started)
            # Dagster shows the message of every cause, and this one may contain the password of the address.
            raise failure from (error if shown(self.uri) == self.uri else None)

    def _try(self, what: str, request: Callable[[], T]) -> T | None:
        started = time.monotonic()
        if started < self._away_until:
            return None
        try:
            result = request()
        except Exception as error:  # of a database, a network or a disk
            ended = time.monotonic()
            self.failure = failure = self._failure(what, error, ended - started)
            if isinstance(failure, RegistryUnavailable) and ended - started > _LONG_SECONDS:
                self._away_until = ended + (ended - started)
            if what not in self._warned:
                self._warned.add(what)
                self.warn(str(failure))
            return None
        self._warned.discard(what)
        return result

    def _failure(self, what: str, error: Exception, seconds: float) -> RegistryError:
        message = f"MLflow at {shown(self.uri)} cannot {what}: {reason(error, self.uri, seconds)}"
        if is_corrupt(error):  # SQLite's message names no remedy
            message += f"; {CORRUPT_REMEDY}"
        return (
            RegistryUnavailable(message)
            if is_away(error)
            else RegistryError(message, code_of(message) or "registry-request")
        )


def connect(uri: str) -> "MlflowClient":
    """Return a client. A new database gets its tables, and an older one its new tables.

    This happens under a lock: of two processes at once, one would fail. Raises RegistryError if the driver of a database is
    not installed, or its address is malformed.
    """
    try:
        with _schema_locked(uri):
            # Without `registry_uri` the client would use the registry named by the environment.
            return mlflow_api.MlflowClient(uri, registry_uri=uri)
    except ValueError as error:
        raise RegistryError(
            f"{_variable(uri)} is {shown(uri)!r}; expected the address of a database: {error}", "wrong-server-address"
        ) from None
    except ModuleNotFoundError as error:
        raise RegistryError(
            f"{shown(uri)} needs the package {error.name}, which is not installed here: install it, or name another database "
            f"or server in {_variable(uri)}",
            "missing-package",
        ) from error


@contextlib.contextmanager
def _schema_locked(uri: str) -> Iterator[None]:
    if is_database(uri):
        with schema_lock(uri):
            yield
    elif database := sqlite_file(uri):
        lock = database.with_name(f"{database.name}.lock")
        with locked(lock):
            if not database.exists():
                _make_tables(database, lock)
            yield
    else:
        yield


def _make_tables(database: Path, lock: Path) -> None:
    """Make the tables under a temporary file name: MLflow can neither use nor finish tables from a killed process."""
    unfinished = database.with_name(f"{database.name}.new")
    for leftover in (unfinished, unfinished.with_name(f"{unfinished.name}-journal")):
        leftover.unlink(missing_ok=True)
    mlflow_api.MlflowClient(f"{_SQLITE}{unfinished}")
    make_group_writable([unfinished], lock)
    unfinished.rename(database)


def retry_while_unavailable(
    work: Callable[[], T], report: Callable[[str], None], seconds: float = _RESTART_SECONDS
) -> T:
    """Return the result of `work`. Repeat it for at most `seconds` while the server is unavailable, as during a restart.

    For scheduled work: no user is there to repeat it. `report` is called once, before the first wait. Raises the errors of
    `work`.
    """
    deadline, waits = time.monotonic() + seconds, False
    while True:
        try:
            return work()
        except RegistryUnavailable as error:
            if time.monotonic() > deadline:
                raise
            if not waits:
                report(f"waits up to {seconds:.0f} s for a server that may be restarting: {error}")
            waits = True
        time.sleep(_BETWEEN_ATTEMPTS)


def is_server(uri: str) -> bool:
    """Return whether a server, not this process, decides where artifacts lie."""
    return uri.startswith(("http://", "https://"))


def is_database(uri: str) -> bool:
    """Return whether the records are in a database, neither behind a server of MLflow nor in a file."""
    return "://" in uri and not is_server(uri) and not uri.startswith(("sqlite", "file:"))


def page(uri: str, path: str = "", query: Mapping[str, str] | None = None) -> str:
    """Return the address of a page on the tracking server, or on the server of a database's pages.

    `workflowType` chooses MLflow's layout for training runs, not for chat traces.
    """
    address = shown(uri) if is_server(uri) else _served_at(uri)
    return f"{address.rstrip('/')}/#/{path}?{urlencode({**(query or {}), 'workflowType': 'machine_learning'})}"


def _served_at(uri: str) -> str:
    """Return the address of a database's pages: PEDIGREE_MLFLOW_UI, else the last one noted, else the default."""
    if address := os.environ.get(PAGES_VARIABLE):
        return address
    with contextlib.suppress(OSError):
        if (note := _note_of_address(uri)) and (noted := note.read_text(encoding="utf-8").strip()):
            return noted
    return DEFAULT_PAGE


def note_address(uri: str, address: str) -> None:
    """Note beside a SQLite file where its pages are served, for links stored later."""
    if note := _note_of_address(uri):
        note.write_text(address, encoding="utf-8")


def _note_of_address(uri: str) -> Path | None:
    database = sqlite_file(uri)
    return None if database is None else database.with_name("served-at.txt")


def _variable(uri: str) -> str:
    """Return the environment variable for the address `uri`."""
    variables = {os.environ.get(variable): variable for variable in (REGISTRY_VARIABLE, TRACKING_VARIABLE)}
    return variables.get(uri, TRACKING_VARIABLE)


def shown(uri: str) -> str:
    """Return the address for messages and logs: without user name and password."""
    if is_database(uri):
        return without_secrets(uri)
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def reason(error: Exception, uri: str, seconds: float) -> str:
    """Return the cause of `error` in one line, without the password of `uri`. For an outage, add what to do."""
    first, *rest = str(error).splitlines() or [""]
    summary = shorten(" ".join([first, *rest]), 500) if first.endswith(":") else first or type(error).__name__
    text = summary.replace(uri.rstrip("/"), shown(uri).rstrip("/"))
    if not is_away(error):
        return text
    return (
        f"no good answer in {seconds:.1f} s ({outage_text(error) or text}); finished work is kept: run again once the server "
        f"answers, or name another one in {_variable(uri)}"
    )
