"""What becomes of a trained policy: its run in MLflow, its version in the registry, and whether it is released.

    tracking.py     a job's events become metrics of one MLflow run; an outage of the server costs nothing but a warning
    run.py          one such run: pending metrics, delivery, continuation
    records.py      recipe, lineage, data set and events in MLflow's terms and within its limits
    gate.py         the release decision, pure: the parameter-free Ladder over paired held-out losses
    registry.py     models with their aliases: registering, promotion, rollback, downloads
    versions.py     what is known of a version, and the tags in which it is written
    package.py      the one part that needs torch; a process of its own, started by files.py
    pedigree_chat.py   what answers chats in MLflow, a copy in each version; the other file that needs torch
    chat_proxy.py   what `pedigree serve` puts in front of `transformers serve`, a process; proxy_settings.py: its settings
    files.py        the files of a version: weights that lie on the disk once
    moved.py        addresses of artifacts, when the home lies elsewhere
    connection.py   how long to wait for a server, and how to name it without its password
    database.py     how long to wait for a database, who makes its tables, and what drivers say if it cannot be reached

The folder above is a source root, not a package, so that `import mlflow` finds the installed library.
"""

import os

# MLflow reads it while it is imported: else every process tells MLflow's makers which of its functions it calls.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
