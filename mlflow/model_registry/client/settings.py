"""Settings of MLflow's client for a while: short timeouts, no retries, no output. It reads them from environment variables."""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

# MLflow's defaults (7 retries, 120 s each) would block a run for minutes. Postgres's drivers wait two minutes for a machine
# without power, as the system does; MySQL's wait ten seconds.
_BRIEF = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "PGCONNECT_TIMEOUT": "10"}
# By default the client repeats a request after a lost answer, and so makes a run or a version twice.
_ONCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
_ENVIRONMENT = threading.RLock()


def brief_patience() -> contextlib.AbstractContextManager[None]:
    """Let MLflow's client give up after seconds, unless the user has set its timeouts. Not for uploads of models."""
    return _environment({name: value for name, value in _BRIEF.items() if name not in os.environ})


def without_retries() -> contextlib.AbstractContextManager[None]:
    """Let MLflow's client send each request once. After a failure, check whether it took effect nevertheless."""
    return _environment(_ONCE)


def quiet() -> contextlib.AbstractContextManager[None]:
    """Keep MLflow's client from printing links to stdout, where a command prints its JSON."""
    return _environment({"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"})


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while. MLflow reads its settings from them at every request.

    One thread at a time: of two, the last to leave would restore the other's values, for all later runs of this process.
    """
    with _ENVIRONMENT:
        previous = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in previous.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
