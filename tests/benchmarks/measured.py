"""Do one job in this process, and say what it cost: `python -m tests.benchmarks.measured JOB.json`.

One JSON object on the last line: CPU-seconds of the job, those of starting and importing before it, and peaks of memory
in MB. A fresh process each, since the peak of a process never falls.
"""

import json
import resource
import sys
import time
from pathlib import Path

from training import main
from training.contract.job import Job
from training.distributed import group


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(path: Path) -> dict[str, float]:
    job = Job.read(path)
    imports, imports_peak, started = time.process_time(), peak_mb(), time.perf_counter()
    with group("cpu") as alone:
        main.make(job, alone)
    return {
        "cpu_seconds": time.process_time() - imports,
        "seconds": time.perf_counter() - started,
        "peak_mb": peak_mb(),
        "imports_cpu_seconds": imports,
        "imports_peak_mb": imports_peak,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Path(sys.argv[1]))) + "\n")
