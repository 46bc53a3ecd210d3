"""Extensions for records in a Postgres or MySQL database.

Fail fast, make the tables once, recognize an outage by the messages of drivers.
"""

import contextlib
import re
from collections.abc import Iterator

from sqlalchemy import NullPool, create_engine
from sqlalchemy import text as statement

# As in SQLAlchemy's messages, after the class name of the driver's error; Postgres has classes such as AdminShutdown.
_AWAY = re.compile(
    r"\((?:sqlite3|psycopg2?|pymysql|MySQLdb)\.\S+\) .*("
    r"database is locked|[Cc]onnection refused|Can't connect|timed out|timeout expired|No route to host|is unreachable|"
    r"could not translate host name|failed to resolve host|"
    r"server closed the connection|connection (?:is|was|has been) (?:closed|lost)|Lost connection|gone away|"
    r"terminating connection|the database system is|Server shutdown|Connection was killed|"
    r"[Tt]oo many (?:clients|connections)|connection slots|"
    r"canceling statement due to|deadlock detected|Deadlock found|Lock wait timeout)"
)
# Held until the transaction, or the connection, ends.
_LOCKS = {
    "postgresql": "SELECT pg_advisory_xact_lock(hashtext('pedigree'))",
    "mysql": "SELECT GET_LOCK('pedigree', 600)",
}
_SECRET_OPTION = re.compile(r"(?<=[?&])(\w*passw(?:or)?d)=[^&]*")


def is_database_away(message: str) -> bool:
    """Return whether a database is down, restarts, accepts no more connections, or was locked for long."""
    return _AWAY.search(message) is not None


@contextlib.contextmanager
def schema_lock(uri: str) -> Iterator[None]:
    """Lock the making of a database's tables; other processes, on any machine, wait.

    Raises SQLAlchemy's error if the database does not answer: MLflow would retry silently for 102 seconds before it reports a
    missing server or a wrong password. Raises ValueError for a malformed port.
    """
    engine = create_engine(uri, poolclass=NullPool)
    with engine.connect() as connection:
        if lock := _LOCKS.get(engine.dialect.name):
            connection.execute(statement(lock))
        yield


def without_secrets(uri: str) -> str:
    """Return a database's address without user name and password.

    SQLAlchemy accepts a password with /, ? or #; `urlsplit` then finds no host after it.
    """
    scheme, _, rest = uri.partition("://")
    kept = _SECRET_OPTION.sub(r"\1=...", rest).rpartition("@")[2]
    return f"{scheme}://{kept}"
