"""Training and the reference pass against TRL, on real pairs: `python -m benchmarks.training DATA`.

DATA is a folder with `preferences-real.jsonl` and `tokenizers/mistral-v3`; TRL is the extra `bench`.
Both sides run on the CPU in float32 on the same pairs in the same order from the same weights. Each measurement has a process
of its own with the same number of threads, and the sides take turns. Our cost covers the job from its start to its published
artifact, self-checks included, without starting Python and importing. TRL's cost covers only the reference pass and the
training, without loading and tokenizing. Peaks of memory are of the whole process.

TRL runs twice: all 8 pairs of a batch in one forward, and one at a time with accumulation, as a careful user has it. Every
step's loss and rewards must agree to 1e-4. Exit status 1 if a limit is missed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.operations import CPU, Operations, count
from benchmarks.setting import BATCH, machine, run, table
from benchmarks.workload import Rows, Workload, multi_turn_rows, policy_job, prepare, reference_job
from training.contract.config.training import Training
from training.contract.protocol.events import read_events
from training.contract.store.artifact import Artifact
from training.contract.store.store import Store
from training.data.tokenization.pair_dataset import Pairs
from training.model.load import load_model

# By pairs of one forward of the peer: the highest acceptable share of its cost.
LIMITS = {
    BATCH: {"reference/cpu_seconds": 1 / 10, "policy/cpu_seconds": 1 / 9, "policy/peak_mb": 0.22},
    1: {"reference/cpu_seconds": 1 / 5, "policy/cpu_seconds": 1 / 5, "policy/peak_mb": 0.45},
}
NAMES = {
    "reference/cpu_seconds": "reference pass, CPU-s",
    "policy/cpu_seconds": "training, CPU-s",
    "policy/peak_mb": "peak memory, MB",
}
SAME = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins")
STEP_TOLERANCE = 1e-4
OPERATIONS = {"kept": 1.15, "recomputed": 1.25}
Costs = dict[str, Any]


def ours(workload: Workload, pairs: Artifact[Any], micro_tokens: int, threads: int) -> Costs:
    scoring = reference_job(workload, pairs)
    costs = {"reference": run("measured", str(scoring.path), threads=threads)}
    scored = Store(scoring.store).find(scoring.artifact, scoring.derivation.key)
    assert scored is not None
    tuning = policy_job(workload, pairs, scored, micro_tokens)
    costs["policy"] = run("measured", str(tuning.path), threads=threads)
    return costs | {"steps": [event for event in read_events(tuning.events) if event["event"] == "step"]}


def compare(data: Path, rows: Rows, micro_tokens: int, threads: int) -> tuple[Costs, dict[int, Costs]]:
    """Measure our side, and TRL's by pairs of one forward. Ours runs before each of TRL's; the dearer run counts."""
    found: list[Costs] = []
    peers: dict[int, Costs] = {}
    for micro in LIMITS:
        with tempfile.TemporaryDirectory() as folder:
            workload, pairs = prepare(data, Path(folder), rows)
            found.append(ours(workload, pairs, micro_tokens, threads))
            peers[micro] = run("peer", folder, "--micro", str(micro), threads=threads)
    return max(found, key=lambda costs: float(costs["policy"]["cpu_seconds"])), peers


def operations_of(data: Path, rows: Rows, micro_tokens: int) -> Operations:
    with tempfile.TemporaryDirectory() as folder:
        workload, pairs = prepare(data, Path(folder), rows)
        return count(load_model(workload.base, "float32", CPU), Pairs.open(pairs.folder), micro_tokens)


def step_difference(found: Costs, peer: Costs) -> float:
    """Return the largest difference between the two sides' metrics of all steps."""
    steps = zip(found["steps"], peer["steps"], strict=True)
    return max(abs(own[name] - other[name]) for own, other in steps for name in SAME)


def of(costs: Costs, name: str) -> float:
    job, quantity = name.split("/")
    return float(costs[job][quantity])


def verdicts(found: Costs, peers: dict[int, Costs], operations: Operations) -> list[tuple[str, float, float]]:
    """Return each quantity with a limit: its name, its value, and its limit."""
    lines = []
    for micro, peer in peers.items():
        where = f"TRL, {micro} a forward"
        lines += [(f"{NAMES[n]}: of {where}", of(found, n) / of(peer, n), most) for n, most in LIMITS[micro].items()]
        lines.append((f"step by step from {where}", step_difference(found, peer), STEP_TOLERANCE))
    for name, most in OPERATIONS.items():
        lines.append((f"operations of the least, logits {name}", getattr(operations, name) / operations.least, most))
    return lines


def costs_table(found: Costs, peers: dict[int, Costs]) -> str:
    head = ["", "ours", *(f"TRL, {micro} a forward (ours is)" for micro in peers)]
    rows = [head]
    for name, shown in NAMES.items():
        theirs = [f"{of(peer, name):,.1f} ({of(found, name) / of(peer, name):.3f})" for peer in peers.values()]
        rows.append([shown, f"{of(found, name):,.1f}", *theirs])
    rows.append(["largest difference of a step", "", *(f"{step_difference(found, p):.1e}" for p in peers.values())])
    return table(rows)


def arguments_of(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder of pairs and tokenizers, as docs/benchmarks.md says")
    parser.add_argument("--micro-tokens", type=int, default=Training().micro_tokens)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    arguments = arguments_of(__doc__)
    sys.stdout.write(machine(arguments.threads) + "\n")
    found, peers = compare(arguments.data, multi_turn_rows, arguments.micro_tokens, arguments.threads)
    operations = operations_of(arguments.data, multi_turn_rows, arguments.micro_tokens)
    lines = verdicts(found, peers, operations)
    sys.stdout.write(costs_table(found, peers))
    for name, value, target in lines:
        sys.stdout.write(f"{'ok  ' if value <= target else 'MISS'}  {name}: {value:.4g} (at most {target:.4g})\n")
    sys.stdout.write(json.dumps({"ours": found, "trl": peers, "operations": vars(operations)}) + "\n")
    return int(any(value > target for _, value, target in lines))


if __name__ == "__main__":
    sys.exit(main())
