"""Training and the reference pass against TRL, on real pairs: `python -m tests.benchmarks.training DATA`.

DATA (or PEDIGREE_BENCH_DATA) is a folder with `preferences-real.jsonl` and `tokenizers/mistral-v3`. Both sides run on the
CPU in float32, each in processes of its own, with the same number of threads; TRL is the extra `bench`. What is measured
is the job from its start to its published artifact, without starting Python and importing; TRL's loading and tokenizing
are not counted at all. Exit status 1 if a target is missed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.operations import count
from tests.benchmarks.workload import BATCH, Workload, policy_job, prepare, reference_job
from training.contract.events import read_events
from training.contract.store import Store
from training.data.batches import Pairs
from training.model.load import load_model

ROOT = Path(__file__).parents[2]
# By pairs of one forward of the peer: the largest share of its cost that is good enough.
TARGETS = {
    BATCH: {"policy/cpu_seconds": 1 / 9, "reference/cpu_seconds": 1 / 10, "policy/peak_mb": 0.22},
    1: {"policy/cpu_seconds": 1 / 5, "reference/cpu_seconds": 1 / 5, "policy/peak_mb": 0.45},
}
SAME = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins")
STEP_TOLERANCE = 1e-4
OPERATIONS = {"kept": 1.15, "recomputed": 1.25}


def run(module: str, *arguments: str, threads: int) -> Any:
    """The JSON on the last line of a module run in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "mlflow"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ours(workload: Workload, pairs: Any, micro_tokens: int, threads: int) -> dict[str, Any]:
    scoring = reference_job(workload, pairs)
    costs = {"reference": run("measured", str(scoring.path), threads=threads)}
    table = Store(scoring.store).find(scoring.artifact, scoring.derivation.key)
    assert table is not None
    tuning = policy_job(workload, pairs, table, micro_tokens)
    costs["policy"] = run("measured", str(tuning.path), threads=threads)
    return costs | {"steps": [event for event in read_events(tuning.events) if event["event"] == "step"]}


def verdicts(found: dict[str, Any], peer: dict[str, Any], micro: int) -> list[tuple[str, float, float]]:
    """Of each quantity: its name, what was found, and what it may be at most."""
    lines = []
    for name, target in TARGETS[micro].items():
        job, quantity = name.split("/")
        lines.append((f"{name} of TRL's, {micro} a forward", found[job][quantity] / peer[job][quantity], target))
    steps = zip(found["steps"], peer["steps"], strict=True)
    worst = max(abs(own[name] - other[name]) for own, other in steps for name in SAME)
    return [*lines, (f"difference of a step from TRL's, {micro} a forward", worst, STEP_TOLERANCE)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", default=os.environ.get("PEDIGREE_BENCH_DATA"))
    parser.add_argument("--micro-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("DATA is needed: a folder with preferences-real.jsonl and tokenizers/mistral-v3")
    with tempfile.TemporaryDirectory() as folder:
        workload, pairs = prepare(arguments.data, Path(folder))
        found = ours(workload, pairs, arguments.micro_tokens, arguments.threads)
        peers = {n: run("peer", folder, "--micro", str(n), threads=arguments.threads) for n in TARGETS}
        model = load_model(workload.base, "float32", torch.device("cpu"))
        operations = count(model, Pairs.open(pairs.folder), arguments.micro_tokens)
    lines = [line for micro, peer in peers.items() for line in verdicts(found, peer, micro)]
    for name, target in OPERATIONS.items():
        lines.append((f"operations of the least, logits {name}", getattr(operations, name) / operations.least, target))
    for name, value, target in lines:
        sys.stdout.write(f"{'ok  ' if value <= target else 'MISS'}  {name}: {value:.4g} (at most {target:.4g})\n")
    sys.stdout.write(json.dumps({"ours": found, "trl": peers, "operations": vars(operations)}) + "\n")
    return int(any(value > target for _, value, target in lines))


if __name__ == "__main__":
    sys.exit(main())
