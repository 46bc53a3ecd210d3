"""A launching process that a test may kill: it runs a job and holds the lock of its key.

Arguments: job.json, and the module that ranks run.
"""

import sys
from pathlib import Path

from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.launch.launcher import run_job
from training.launch.local import LocalEngine

if __name__ == "__main__":
    job = Job.read(Path(sys.argv[1]))
    with Store(job.store).lock(job.artifact, job.derivation.key) as lock:
        run_job(LocalEngine(sys.argv[2]), job, on_event=lambda event: None, lock=lock)
