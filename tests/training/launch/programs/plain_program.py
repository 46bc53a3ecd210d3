"""A job of one small process without torch. `code_version` selects its behavior."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Failure, Job
from training.launch.process_tree import ancestors

# An orphan in its own session that ignores SIGTERM. A signal to the process group would miss it.
_STUBBORN_ORPHAN = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork() and os._exit(0); "
    "os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
)


def main() -> None:
    job = Job.read(Path(sys.argv[1]))
    rank = int(os.environ.get("RANK", 0))
    events = EventWriter(None if rank else job.events, keep=job.checkpoints.exists())
    act = job.code_version
    if act == "status":
        sys.stdout.write("last line\n")
        sys.exit(3)
    if act == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if act == "half_a_failure":
        job.error.write_text('{"type": "Val')
        sys.exit(1)
    if act == "data_error":
        failure = Failure(type="DataError", message="row 7 is not a pair", rank=0, traceback="")
        job.error.write_text(failure.model_dump_json())
        sys.exit(1)
    if act == "report":
        # torchrun's reports if rank 0 on node 0 was killed and node 1 was ended by SIGTERM
        sys.stdout.write(
            "[node 1]   rank      : 1 (local_rank: 0)\n[node 0]   rank      : 0 (local_rank: 0)\n"
            "[node 1]   exitcode  : -15 (pid: 12)\n[node 0]   exitcode  : -9 (pid: 11)\n"
        )
        sys.exit(1)
    if act == "silent":
        sys.exit(3)
    if act == "out_of_memory":
        sys.stdout.write("terminate called after throwing an instance of 'std::bad_alloc'\n")
        sys.stdout.write("Extension modules: numpy.core, pyarrow.lib (total: 2)\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGABRT)
    if act == "report_of_an_error":
        # torchrun's report if rank 0 ended with an exit status, and rank 1 was ended for it
        sys.stdout.write("  rank      : 1 (local_rank: 1)\n  exitcode  : -15 (pid: 2)\n")
        sys.stdout.write("  rank      : 0 (local_rank: 0)\n  exitcode  : 70 (pid: 1)\n")
        sys.exit(1)
    if act == "report_of_deaf_ranks":
        # torchrun's report if rank 1 crashed and the others ignored SIGTERM: the root cause is last
        ended = [(0, 9), (2, 9), (1, 11)]
        entries = [
            f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : -{number} (pid: 1)\n" for rank, number in ended
        ]
        sys.stdout.write("".join(entries))
        sys.exit(1)
    if act == "sleep_on_nodes":
        (job.folder / f"pids-{rank}").write_text(" ".join(map(str, [os.getpid(), *ancestors()[:2]])))
        files = [job.folder / f"pids-{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
        while not all(file.exists() and file.read_text() for file in files):
            time.sleep(0.01)
        events.emit("note", pids=[list(map(int, file.read_text().split())) for file in files])
        time.sleep(600)
    if act == "answered":
        events.emit("step", step=1, loss=0.5)
        while not (job.folder / "answer").exists():
            time.sleep(0.01)
        events.emit("step", step=2, loss=0.25)
    if act == "signals":
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        events.emit(
            "note",
            interrupt=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            terminate=signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            blocked=sorted(blocked),
        )
    if act == "orphan":
        orphan = subprocess.Popen([sys.executable, "-c", _STUBBORN_ORPHAN], stdout=subprocess.PIPE, text=True)
        events.emit("note", pids=[os.getpid(), int(orphan.stdout.readline())])
        time.sleep(600)


if __name__ == "__main__":
    main()
