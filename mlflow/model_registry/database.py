"""What MLflow leaves to others where its records are in a database of Postgres or MySQL: to see at once that it does not
answer, to make the tables once, and to know an outage by the words of a driver.
"""

import contextlib
import re
from collections.abc import Iterator

from sqlalchemy import NullPool, create_engine
from sqlalchemy import text as statement

# As SQLAlchemy gives them behind the name of the driver's error; of Postgres, AdminShutdown and others have their own class.
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


def is_database_away(words: str) -> bool:
    """Whether a database is down, restarts, takes no more connections, or is held by others for long."""
    return _AWAY.search(words) is not None


@contextlib.contextmanager
def schema_lock(uri: str) -> Iterator[None]:
    """The right to make the tables of a database; whoever else asks, on any machine, waits.

    Raises what SQLAlchemy raises where the database does not answer: MLflow asks ten times, for 102 seconds in silence, before
    it says that nobody listens or that a password is wrong. ValueError for a port that is no number.
    """
    engine = create_engine(uri, poolclass=NullPool)
    with engine.connect() as connection:
        if lock := _LOCKS.get(engine.dialect.name):
            connection.execute(statement(lock))
        yield


def without_secrets(uri: str) -> str:
    """A database's address without user name and password.

    SQLAlchemy takes a password with any of /?# in it as it is, behind which `urlsplit` sees no host any more.
    """
    scheme, _, rest = uri.partition("://")
    kept = _SECRET_OPTION.sub(r"\1=...", rest).rpartition("@")[2]
    return f"{scheme}://{kept}"
