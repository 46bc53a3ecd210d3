"""All checks of this project that need a GPU, in one command: `python -m benchmarks.gpu.once OUT`.

For a machine that is lent for minutes and may be taken back at any time. Each part is a process of its own with a time limit,
and prints to a file in OUT while it runs. A part that fails or is late does not stop the others. The end of each part is
appended to OUT/parts.jsonl.

    tests       the quick tests marked `gpu`: is it right
    benchmark   benchmarks/gpu/__main__.py: how fast; its sides also in OUT/sides.jsonl
    compiler    tests marked `gpu` that compile

It needs torch 2.11 or later, transformers, peft, pydantic, pyarrow, psutil, and pytest with pytest-timeout and
pytest-xdist; TRL's sides need the extra `bench-gpu`. `--size tiny --device cpu` tries it on any machine.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.setting import SIZES
from benchmarks.setting import ROOT

_PYTEST = ["-m", "pytest", "-p", "no:cacheprovider", "--timeout", "150"]
# Import no other module: it may need a library, or a version of one, that is missing.
_PYTEST += [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in file.read_text()]


@dataclass(frozen=True)
class Part:
    """The arguments for Python, and the time limit in seconds."""

    name: str
    arguments: list[str]
    seconds: float


@dataclass(frozen=True)
class End:
    """The end of a part; `status` is None if it was late."""

    name: str
    status: int | None
    seconds: float


def parts(out: Path, size: str, device: str) -> list[Part]:
    """Return the parts, the most important first; their limits sum to 570 seconds."""
    benchmark = ["-m", "benchmarks.gpu", "--size", size, "--device", device, "--side-seconds", "110"]
    return [
        Part("tests", [*_PYTEST, "-n", str(min(5, os.cpu_count() or 1)), "-m", "gpu and not slow"], 150),
        Part("benchmark", [*benchmark, "--record", str(out / "sides.jsonl")], 320),
        Part("compiler", [*_PYTEST, "-m", "gpu and slow"], 100),
    ]


def do(part: Part, out: Path) -> End:
    """Run a part with its output in a file. If it is late, end it with all processes that it started."""
    started, status = time.monotonic(), None
    paths = [str(ROOT), str(ROOT / "mlflow"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with (out / f"{part.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return End(part.name, status, round(time.monotonic() - started, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    ends = []
    for part in parts(out, arguments.size, arguments.device):
        ends.append(do(part, out))
        with (out / "parts.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(ends[-1])) + "\n")
        log = (out / f"{part.name}.log").read_text(encoding="utf-8")
        sys.stdout.write(f"== {ends[-1]}\n{log[-3000:]}\n")
        sys.stdout.flush()
    return int(any(end.status != 0 for end in ends))


if __name__ == "__main__":
    sys.exit(main())
