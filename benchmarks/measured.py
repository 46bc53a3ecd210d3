"""Run one job in this process and print its cost: `python -m benchmarks.measured JOB.json`.

One JSON object on the last line: CPU-seconds of the job, CPU-seconds of starting and importing, and peaks of memory in MB.
The peak of a process never falls, so each job has a fresh process. The imports of a job's kind come first, as the job does
them.
"""

import json
import sys
import time
from pathlib import Path

from benchmarks.setting import cpu_seconds, peak_mb
from training import main
from training.contract.protocol.job import Job
from training.contract.system.imports import import_without_gc
from training.distributed import group


def measure(path: Path) -> dict[str, float]:
    job = Job.read(path)
    import_without_gc(main.WORK[job.kind])
    imports, imports_peak, started = cpu_seconds(), peak_mb(), time.perf_counter()
    with group(job.compute.device) as alone:
        main.make(job, alone)
    return {
        "cpu_seconds": cpu_seconds() - imports,
        "seconds": time.perf_counter() - started,
        "peak_mb": peak_mb(),
        "imports_cpu_seconds": imports,
        "imports_peak_mb": imports_peak,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Path(sys.argv[1]))) + "\n")
