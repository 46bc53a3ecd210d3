"""MLflow's client, imported at its first use, and its records, read without it.

* `mlflow_api`: all that is called of MLflow.
* `settings`: the client's timeouts and retries.
* `database`: timeouts, tables and errors of a database.
* `records`: runs and versions, only to be read.
* `sqlite_records`: the same, from a SQLite file.
"""
