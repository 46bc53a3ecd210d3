"""MLflow's client, imported at its first use, and its records, read without it.

* `mlflow_api`: all that is called of MLflow.
* `mlflow_patches`: all that is replaced in it.
* `settings`: the client's timeouts and retries.
* `database`: timeouts and tables of a database, and its address without a password.
* `outages`: whether an error means that there was no answer.
* `records`: runs and versions, only to be read.
* `sqlite_records`: the same, from a SQLite file.
* `relocate`: addresses of artifacts after PEDIGREE_HOME was moved.
"""
