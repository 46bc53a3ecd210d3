"""The line to MLflow: made on first use, impatient, and never the reason that other work stops."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from mlflow import MlflowClient

# MLflow's own defaults (7 retries, 120 s each) would hold up whoever follows a training for minutes.
_BRIEF = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
LOCAL_PAGE = "http://127.0.0.1:5000"
_SQLITE = "sqlite:///"


class Connection:
    """A tracking server or database that may be away. `warn` is told, in one sentence, whatever does not work."""

    def __init__(self, uri: str, warn: Callable[[str], None]) -> None:
        self.uri, self.warn = uri, warn

    @cached_property
    def client(self) -> MlflowClient:
        return connect(self.uri)

    def attempt(self, what: str, work: Callable[[MlflowClient], None], quiet: bool = False) -> bool:
        """Do `work` within seconds; gives whether it succeeded, and warns unless `quiet` where it did not."""
        try:
            with brief_patience():
                work(self.client)
        except Exception as error:  # whatever a database, a network or a disk can do
            if not quiet:
                self.warn(f"MLflow at {shown(self.uri)} cannot {what}: {reason(error, self.uri)}")
            return False
        return True


def connect(uri: str) -> MlflowClient:
    if uri.startswith(_SQLITE):
        Path(uri.removeprefix(_SQLITE)).parent.mkdir(parents=True, exist_ok=True)
    return MlflowClient(uri)


@contextlib.contextmanager
def brief_patience() -> Iterator[None]:
    """Let MLflow's client give up after seconds, unless the person who runs this has set its patience already.

    MLflow reads these settings from the environment at every request and takes them nowhere else, so they are set for
    the duration of the call only: an upload of a model through the same server keeps the long patience it needs.
    """
    added = {name: value for name, value in _BRIEF.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def is_server(uri: str) -> bool:
    """Whether a server, not this process, decides where artifacts lie."""
    return uri.startswith(("http://", "https://", "databricks"))


def page(uri: str, path: str = "") -> str:
    """A page of MLflow's: on the tracking server, or, for a database, where `pedigree ui` serves it by default.

    Without the last part, MLflow opens its pages in the form made for chat traces.
    """
    address = shown(uri).rstrip("/") if is_server(uri) else LOCAL_PAGE
    return f"{address}/#/{path}?workflowType=machine_learning"


def shown(uri: str) -> str:
    """The address as it may stand in a message or a log: without user name and password."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def reason(error: Exception, uri: str) -> str:
    """The first line of what went wrong, without the password of `uri`."""
    first = next(iter(str(error).splitlines()), "") or type(error).__name__
    return first.replace(uri.rstrip("/"), shown(uri).rstrip("/"))
