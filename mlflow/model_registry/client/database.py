"""Extensions for records in a Postgres or MySQL database.

Fail fast, make the tables once, and keep passwords out of messages.
"""

import contextlib
import re
from collections.abc import Iterator

from sqlalchemy import NullPool, create_engine
from sqlalchemy import text as statement

# Held until the transaction, or the connection, ends.
_LOCKS = {
    "postgresql": "SELECT pg_advisory_xact_lock(hashtext('pedigree'))",
    "mysql": "SELECT GET_LOCK('pedigree', 600)",
}
_SECRET_OPTION = re.compile(r"(?<=[?&])(\w*passw(?:or)?d)=[^&]*")


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
