"""A launching process of its own, to be killed by a test: runs the job whose job.json is given, under the key's lock.

The other arguments are the module that ranks run and the file that lists the nodes, which one node needs not.
"""

import sys
from pathlib import Path

from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.launch.conductor import NodesLauncher
from training.launch.launcher import run_job

if __name__ == "__main__":
    job = Job.read(Path(sys.argv[1]))
    with Store(job.store).lock(job.artifact, job.derivation.key) as lock:
        run_job(NodesLauncher(Path(sys.argv[3]), sys.argv[2]), job, on_event=lambda event: None, lock=lock)
