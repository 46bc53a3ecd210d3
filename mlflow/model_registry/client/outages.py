"""Recognize outages by types and codes of errors. MLflow's own error has one type for all, so its causes decide.

Types of HTTP clients are compared by name: importing the clients takes as long as a whole command, and botocore is optional.
"""

import re
import sqlite3
from collections.abc import Iterator

from sqlalchemy.exc import DBAPIError

from model_registry.client import mlflow_api
from training.contract.errors import PedigreeError

_NO_ANSWER = {
    "requests.exceptions.ConnectionError",  # also of proxies and TLS
    "requests.exceptions.Timeout",
    "requests.exceptions.RetryError",
    "requests.exceptions.ChunkedEncodingError",
}
_NO_FILES = {"botocore.exceptions.ConnectionError", "botocore.exceptions.HTTPClientError"}
_FAULTS_OF_SERVER = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE")
# MLflow keeps only the text of these: of an answer without JSON, which may come from a proxy, the status;
_STATUS = re.compile(r"failed with error code (408|429|5\d\d) ")
# and of several failed downloads the messages of their errors.
_SUMMARY = re.compile(
    r"The following failures occurred while downloading .*(Max retries exceeded|failed with timeout exception|"
    r"exception \('Connection |failed with error code (408|429|5\d\d) |endpoint URL)",
    re.DOTALL,
)
_SQLITE_AWAY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_SQLITE_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# https://www.postgresql.org/docs/current/errcodes-appendix.html: broken connections; too many, canceled by a time limit,
# shut down, crashed or starting, deadlock, lock not available
_SQLSTATE_AWAY = re.compile("08...|53300|57014|57P0[123]|40P01|55P03")
# https://dev.mysql.com/doc/mysql-errors/en/: too many connections, shut down, lock timeout, deadlock, connection killed; and of
# the client: no connection, lost connection
_MYSQL_AWAY = {1040, 1053, 1205, 1213, 1927, 2002, 2003, 2005, 2006, 2013, 2055}
# Before a connection exists, Postgres's drivers have no code, neither for a wrong password nor for an outage.
_NOT_CONNECTED = re.compile(
    "[Cc]onnection refused|timed out|timeout expired|No route to host|is unreachable|could not translate host name|"
    "failed to resolve host|the database system is|too many clients|connection slots"
)


def is_away(error: BaseException) -> bool:
    """Return whether a server, a database or an object store gave no answer, or a server only internal errors."""
    for cause in _causes(error):
        if isinstance(cause, DBAPIError):
            return _is_database_away(cause)
        if _names(cause) & (_NO_ANSWER | _NO_FILES):
            return True
    if isinstance(error, mlflow_api.RestException):
        return error.json.get("error_code") in _FAULTS_OF_SERVER
    return _STATUS.search(str(error)) is not None or _SUMMARY.match(str(error)) is not None


def is_corrupt(error: BaseException) -> bool:
    """Return whether a SQLite file is damaged, or is no database."""
    return any(_sqlite_code(cause.orig) in _SQLITE_CORRUPT for cause in _causes(error) if isinstance(cause, DBAPIError))


def outage_text(error: BaseException) -> str | None:
    """Return the text of the first error of a failed HTTP request, without its address; None for other errors."""
    causes = list(_causes(error))
    if not any(_names(cause) & _NO_ANSWER for cause in causes):
        return None
    return str(causes[-1]) or type(causes[-1]).__name__


def _is_database_away(error: DBAPIError) -> bool:
    """Return whether a database is down, restarts, accepts no more connections, or was locked for long."""
    driver = error.orig
    if error.connection_invalidated or _sqlite_code(driver) in _SQLITE_AWAY:
        return True
    if state := getattr(driver, "sqlstate", None) or getattr(driver, "pgcode", None):  # of psycopg, and of psycopg2
        return _SQLSTATE_AWAY.fullmatch(state) is not None
    if driver is not None and driver.args and isinstance(number := driver.args[0], int):
        return number in _MYSQL_AWAY
    return _NOT_CONNECTED.search(str(driver)) is not None


def _sqlite_code(driver: BaseException | None) -> int | None:
    """Return the primary one of SQLite's result codes: the low byte of an extended one."""
    code = getattr(driver, "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, nearest first. Stop before an earlier error of Pedigree itself."""
    current: BaseException | None = error
    while current is not None and not (isinstance(current, PedigreeError) and current is not error):
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _names(error: BaseException) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
