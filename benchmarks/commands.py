"""CPU time of everyday commands: `python -m benchmarks.commands`.

A small recipe is run once in a temporary home. Then each command runs in a process of its own, in turn with `import dagster`,
the measure beside it. Figures are medians of `--rounds` (by default 5), of user and system time. The last row packages the
released policy again, as a release does. Exit status 1 if a command takes more than its limit of the measure.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.setting import ROOT, Failed, children_seconds, machine, table
from tests.workflows import question_pairs
from tests.workflows.homes import ATTRIBUTES, write_recipe

MEASURE = "import dagster"
LIMITS = {"pedigree status": 2.5, "unchanged pedigree run": 4.5}
PAIRS = 160


def write_inputs(folder: Path) -> Path:
    """Write the recipe to `folder`, with its pairs, and a base model with random weights."""
    folder.mkdir()
    tokenizer = question_pairs.write_data(folder, list(itertools.islice(question_pairs.pairs(), PAIRS)))
    question_pairs.make_model(tokenizer).save_pretrained(folder / "base")
    return write_recipe(folder, ATTRIBUTES)


def environment_of(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DAGSTER_", "MLFLOW_"))}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "mlflow"), os.environ.get("PYTHONPATH", "")])
    return kept | {"PEDIGREE_HOME": str(home), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def cpu_seconds_of(command: Sequence[str], environment: dict[str, str]) -> float:
    """Return the CPU time of a command and its processes. Raises Failed."""
    before = children_seconds()
    done = subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return children_seconds() - before


def packaging(home: Path, out: Path) -> list[str]:
    """Return the command that packages the policy in the store of `home` in the new folder `out`."""
    [policy] = (home / "store" / "policy").iterdir()
    [spec] = (home / "store" / "release_spec").iterdir()
    return ["-m", "model_registry.package_model", "models:/small", str(policy), str(spec / "tokenizer"), str(out)]


def measured(folder: Path, rounds: int) -> dict[str, float]:
    """Return the median CPU-seconds of each command, in a home below `folder`."""
    home, recipe = folder / "home", str(write_inputs(folder / "small"))
    environment = environment_of(home)
    cpu_seconds_of(["-m", "pedigree", "run", recipe], environment)
    commands = {
        MEASURE: ["-c", "import dagster"],
        "pedigree --help": ["-m", "pedigree", "--help"],
        "pedigree status": ["-m", "pedigree", "status", recipe],
        "unchanged pedigree run": ["-m", "pedigree", "run", recipe],
    }
    seconds: dict[str, list[float]] = {name: [] for name in [*commands, "packaging a version"]}
    for number in range(rounds):
        for name, command in {**commands, "packaging a version": packaging(home, folder / str(number))}.items():
            seconds[name].append(cpu_seconds_of(command, environment))
    return {name: statistics.median(found) for name, found in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sys.stdout.write(machine(1) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        seconds = measured(Path(folder), arguments.rounds)
    ratios = {name: found / seconds[MEASURE] for name, found in seconds.items()}
    rows = [[name, f"{found:.2f}", f"{ratios[name]:.2f}"] for name, found in seconds.items()]
    sys.stdout.write(table([["", "CPU-s", f"of `{MEASURE}`"], *rows]))
    for name, most in LIMITS.items():
        sys.stdout.write(f"{'ok  ' if ratios[name] <= most else 'MISS'}  {name}: {ratios[name]:.2f} (at most {most})\n")
    sys.stdout.write(json.dumps(seconds) + "\n")
    return int(any(ratios[name] > most for name, most in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
