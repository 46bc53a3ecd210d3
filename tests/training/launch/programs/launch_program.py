"""A launching process of its own, to be killed by a test: runs the job whose job.json is given, under the key's lock."""

import sys
from pathlib import Path

from training.contract.job import Job
from training.contract.store import Store
from training.launch.launcher import run_job
from training.launch.local import LocalLauncher

if __name__ == "__main__":
    job = Job.read(Path(sys.argv[1]))
    with Store(job.store).lock(job.artifact, job.derivation.key) as lock:
        run_job(LocalLauncher("ranked_program"), job, on_event=lambda event: None, lock=lock)
