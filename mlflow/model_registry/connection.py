"""The connection to MLflow: opened on first use, with short timeouts, so that an outage does not hold up other work."""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

from mlflow import MlflowClient
from mlflow.exceptions import RestException
from sqlalchemy import make_url

from model_registry.database import is_database_away, schema_lock, without_secrets
from training.contract.errors import PedigreeError, RegistryError, RegistryUnavailable
from training.contract.system.atomic_io import make_group_writable
from training.contract.system.locks import locked

# MLflow's own defaults (7 retries, 120 s each) would hold up whoever follows a training for minutes.
# Postgres's drivers would wait for a machine that is off as long as the system does, two minutes; MySQL's wait ten seconds.
_BRIEF = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "PGCONNECT_TIMEOUT": "10"}
_LONG_SECONDS = 1.0
DEFAULT_PAGE = "http://127.0.0.1:5000"
# The client repeats a request whose answer was lost, which would make a run or a version twice.
_ONCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
# How requests' client says that it gave up, and why; of that, the words behind the name of a class and the address.
_GAVE_UP = re.compile(r"Max retries exceeded.*\(Caused by (?P<cause>.*)\)(?=$|\. To increase the timeout)")
_WORDS = re.compile(r"""\w+\((?:<.*>, )?(["'])(?:HTTPS?Connection(?:Pool)?\([^)]*\): )?(?P<words>.*)\1\)""")
# How MLflow's client says the same of a request that it does not repeat, or whose last answer it passes on.
_UNANSWERED = re.compile(r"failed with (timeout exception|exception \('Connection |error code (408|429|5\d\d) )")
_FAULTS_OF_SERVER = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE")
# What botocore says of each way in which a store of objects gives no answer.
_FILES_AWAY = re.compile(r"(Could not connect to the|timeout on|valid response from) endpoint URL")
_RESTART_SECONDS = 60.0
_BETWEEN_ATTEMPTS = 1.0
_SQLITE = "sqlite:///"
TRACKING_VARIABLE, REGISTRY_VARIABLE = "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"
PAGES_VARIABLE = "PEDIGREE_MLFLOW_UI"  # names the address of the pages over a database
_ENVIRONMENT = threading.RLock()
_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Connection:
    """A tracking server or database that may be away: `asking` raises then, `try_request` tells `warn` and goes on.

    After a failure that took long, every attempt fails at once for as long again, so that ten calls do not wait ten times.
    `failure` is that of the last attempt that failed.
    """

    def __init__(self, uri: str, warn: Callable[[str], None] = _LOG.warning) -> None:
        self.uri, self.warn = uri, warn
        self.failure: RegistryError | None = None
        self._away_until = 0.0
        self._told: set[str] = set()

    @cached_property
    def client(self) -> MlflowClient:
        return connect(self.uri)

    @contextlib.contextmanager
    def asking(self, what: str, patient: bool = False) -> Iterator[MlflowClient]:
        """The client, with short timeouts unless `patient`, as for files. Raises RegistryError, RegistryUnavailable."""
        started = time.monotonic()
        try:
            with contextlib.nullcontext() if patient else _brief_patience():
                yield self.client
        except PedigreeError:
            raise
        except Exception as error:  # MLflow's, a database's, the disk's, or one of the client of a cloud with the files
            failure = self._failure(what, error, time.monotonic() - started)
            # Dagster shows the words of every cause, and those of this one may have the password of the address.
            raise failure from (error if shown(self.uri) == self.uri else None)

    def try_request(self, what: str, work: Callable[[MlflowClient], T]) -> T | None:
        """What `work` gives, done with short timeouts; None where it fails, with a warning, once until `what` succeeds."""
        started = time.monotonic()
        if started < self._away_until:
            return None
        try:
            with _brief_patience():
                done = work(self.client)
        except Exception as error:  # whatever a database, a network or a disk can do
            ended = time.monotonic()
            self.failure = failure = self._failure(what, error, ended - started)
            if isinstance(failure, RegistryUnavailable) and ended - started > _LONG_SECONDS:
                self._away_until = ended + (ended - started)
            if what not in self._told:
                self._told.add(what)
                self.warn(str(failure))
            return None
        self._told.discard(what)
        return done

    def _failure(self, what: str, error: Exception, seconds: float) -> RegistryError:
        kind = RegistryUnavailable if is_away(error) else RegistryError
        return kind(f"MLflow at {shown(self.uri)} cannot {what}: {reason(error, self.uri, seconds)}")


def connect(uri: str) -> MlflowClient:
    """A client. A new database gets its tables, and one of an older MLflow those that are new, under a lock: of two processes
    at once, one would fail.

    Raises RegistryError where the driver of a database is not installed or its address is none.
    """
    try:
        with _sole_opener(uri):
            return MlflowClient(uri, registry_uri=uri)  # by itself it would take the registry of the environment
    except ValueError as error:
        raise RegistryError(f"{_variable(uri)} is {shown(uri)!r}, which is no address of a database: {error}") from None
    except ModuleNotFoundError as error:
        raise RegistryError(
            f"{shown(uri)} needs the package {error.name}, which is not installed here: install it, or name another database "
            f"or server in {_variable(uri)}"
        ) from error


@contextlib.contextmanager
def _sole_opener(uri: str) -> Iterator[None]:
    if is_database(uri):
        with schema_lock(uri):
            yield
    elif database := _sqlite_file(uri):
        lock = database.with_name(f"{database.name}.lock")
        with locked(lock):
            if not database.exists():
                _make_tables(database, lock)
            yield
    else:
        yield


def _sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite database, whose address may end in options such as `?timeout=60`; None for other addresses."""
    return Path(make_url(uri).database or "") if uri.startswith(_SQLITE) else None


def _make_tables(database: Path, lock: Path) -> None:
    """Under another name until all are there: what a killed process has left, MLflow can neither use nor finish."""
    unfinished = database.with_name(f"{database.name}.new")
    for left in (unfinished, unfinished.with_name(f"{unfinished.name}-journal")):
        left.unlink(missing_ok=True)
    MlflowClient(f"{_SQLITE}{unfinished}")
    make_group_writable([unfinished], lock)
    unfinished.rename(database)


def _brief_patience() -> contextlib.AbstractContextManager[None]:
    """Let MLflow's client give up after seconds, unless the user has set its timeouts. Not for uploads of models."""
    return _environment({name: value for name, value in _BRIEF.items() if name not in os.environ})


def without_retries() -> contextlib.AbstractContextManager[None]:
    """Let MLflow's client send each request once. After a failure, check whether it took effect nevertheless."""
    return _environment(_ONCE)


def quiet() -> contextlib.AbstractContextManager[None]:
    """Keep MLflow's client from printing links to stdout, where a command has its JSON."""
    return _environment({"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"})


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """MLflow reads its settings from the environment at every request and takes them nowhere else.

    One thread at a time: of two, the last to leave would restore what the other had set, for all runs started from here.
    """
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def retry_while_unavailable(work: Callable[[], T], tell: Callable[[str], None], seconds: float = _RESTART_SECONDS) -> T:
    """The result of `work`, repeated while the server is away, for at most `seconds`: one that restarts is back by then.

    For scheduled work, which nobody is there to repeat. `tell` hears once that it waits. Raises what `work` raises.
    """
    deadline, waits = time.monotonic() + seconds, False
    while True:
        try:
            return work()
        except RegistryUnavailable as error:
            if time.monotonic() > deadline:
                raise
            if not waits:
                tell(f"waits up to {seconds:.0f} s for a server that may be restarting: {error}")
            waits = True
        time.sleep(_BETWEEN_ATTEMPTS)


def is_away(error: Exception) -> bool:
    """Whether the server gave no answer, or only server errors; or a database, or a store of files, gave none."""
    words = str(error)
    if isinstance(error, RestException) and error.json.get("error_code") in _FAULTS_OF_SERVER:
        return True
    return is_database_away(words) or any(found.search(words) for found in (_GAVE_UP, _UNANSWERED, _FILES_AWAY))


def is_server(uri: str) -> bool:
    """Whether a server, not this process, decides where artifacts lie."""
    return uri.startswith(("http://", "https://"))


def is_database(uri: str) -> bool:
    """Whether records are in a database that is neither a server of MLflow nor a file."""
    return "://" in uri and not is_server(uri) and not uri.startswith(("sqlite", "file:"))


def page(uri: str, path: str = "") -> str:
    """The address of a page: on the tracking server, or where the pages over a database are served.

    `workflowType` chooses MLflow's layout for training runs over the one for chat traces.
    """
    address = shown(uri) if is_server(uri) else _served_at(uri)
    return f"{address.rstrip('/')}/#/{path}?workflowType=machine_learning"


def _served_at(uri: str) -> str:
    """Where the pages over a database are: at PEDIGREE_MLFLOW_UI, else where they were last served, else at the default."""
    if told := os.environ.get(PAGES_VARIABLE):
        return told
    with contextlib.suppress(OSError):
        if (note := _note_of_address(uri)) and (noted := note.read_text(encoding="utf-8").strip()):
            return noted
    return DEFAULT_PAGE


def note_address(uri: str, address: str) -> None:
    """Note beside a SQLite file where its pages are served, for links that are stored later."""
    if note := _note_of_address(uri):
        note.write_text(address, encoding="utf-8")


def _note_of_address(uri: str) -> Path | None:
    database = _sqlite_file(uri)
    return None if database is None else database.with_name("served-at.txt")


def _variable(uri: str) -> str:
    """Where a person names the address."""
    given = {os.environ.get(variable): variable for variable in (REGISTRY_VARIABLE, TRACKING_VARIABLE)}
    return given.get(uri, TRACKING_VARIABLE)


def shown(uri: str) -> str:
    """The address for messages and logs: without user name and password."""
    if is_database(uri):
        return without_secrets(uri)
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def reason(error: Exception, uri: str, seconds: float) -> str:
    """What went wrong, in a line, without the password of `uri`; of a server that is away, what to do."""
    first, *rest = str(error).splitlines() or [""]
    account = shorten(" ".join([first, *rest]), 500) if first.endswith(":") else first or type(error).__name__
    text = account.replace(uri.rstrip("/"), shown(uri).rstrip("/"))
    if (gave_up := _GAVE_UP.search(text)) is not None:
        found = _WORDS.fullmatch(gave_up["cause"])
        why = found["words"] if found else gave_up["cause"]
    elif is_away(error):
        why = text
    else:
        return text
    return (
        f"no good answer in {seconds:.1f} s ({why}); nothing that was computed is lost: run again once it "
        f"answers, or name another server in {_variable(uri)}"
    )
