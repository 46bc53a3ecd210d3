"""A launching process that a test may kill: it runs a job and holds the lock of its key.

Arguments: job.json, the module that ranks run, and the home with engine.yaml, if any.
"""

import sys
from pathlib import Path

from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.launch.cluster.configured import ConfiguredEngine
from training.launch.launcher import run_job

if __name__ == "__main__":
    job = Job.read(Path(sys.argv[1]))
    with Store(job.store).lock(job.artifact, job.derivation.key) as lock:
        run_job(ConfiguredEngine(Path(sys.argv[3]), sys.argv[2]), job, on_event=lambda event: None, lock=lock)
