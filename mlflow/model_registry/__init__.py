"""Tracking in MLflow, the model registry, and the gate.

    tracking.py       turns a job's events into metrics of one MLflow run; an outage of the server costs only a warning
    tracked_run.py    one such run: pending metrics, delivery, continuation
    mlflow_types.py   recipe, lineage, data set and events as MLflow types, within MLflow's limits
    gate.py           the release decision, a pure function of paired held-out losses
    registry.py       models with their aliases: registering, promotion, rollback, downloads
    model_version.py  a version of a model, and the tags with its record
    package_model.py  packages a version in a separate process; needs transformers
    pedigree_chat.py  answers chats in MLflow; each version has a copy; needs torch
    chat_proxy.py     the process in front of `transformers serve`; proxy_settings.py has its settings
    downloads.py      models fetched from a remote artifact store
    files.py          the files of a version; its weights are hard links
    connection.py     an available or unavailable server, and its address without the password
    client/           MLflow's client, imported at its first use, its records, read without it, and their addresses

The folder above is a source root, not a package, so `import mlflow` finds the installed library.
"""

import os

# MLflow reads it at import. Otherwise every process reports its calls of MLflow to MLflow's developers.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
