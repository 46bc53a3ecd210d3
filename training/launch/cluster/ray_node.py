"""The processes of a job on one node of Ray, below this process, their supervisor.

`python -P -m training.launch.cluster.ray_node JOB.json SHA256 MODULE NODE FIRST PORT`, as the actor of the node starts it. When
the actor ends, standard input is closed, and the supervisor ends everything.
"""

import os
import platform
import sys
from pathlib import Path

from training.contract.errors import PedigreeError
from training.launch.cluster.ray_files import sign_of_life
from training.launch.cluster.task import check_job, command_of, report
from training.launch.supervisor import restore_signals, supervise


def main(path: Path, sha256: str, module: str, node: int, first: str, port: int) -> int:
    """Return the exit status of the processes; 1 if this machine cannot run them."""
    try:
        job = check_job(path, sha256)
        command, variables = command_of(job, module, node, first, port)
        with sign_of_life(job, node, f"{platform.node()} (process {os.getpid()})"):
            return supervise(job.grace_seconds, command, variables)
    except (PedigreeError, OSError) as error:
        report(error, path)
        return 1


if __name__ == "__main__":
    restore_signals()
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6])))
