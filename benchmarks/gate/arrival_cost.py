"""The cost of test-then-train: `python -m benchmarks.gate.arrival_cost DATA`.

Of the real pairs of rasbt, 5% are new. The champion and two waiting candidates, variants of tiny-chat, score them in one job of
`prequential_scores`. The peer scores the same pairs once a policy: three jobs of `reference_logprobs` on a table of the new
pairs alone. CPU-seconds include starting the processes. Exit status 1 if ours costs more.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.setting import machine, run, table
from tests.training.job_runner import JobRunner
from training.contract.protocol.job import Job
from training.contract.store.artifact import Artifact

NEW = 0.05
POLICIES = 3
_RULES = {"train_on": "last_response", "max_length": 1024, "over_length": "drop", "template_kwargs": {}}
_SCORING = {"dtype": "float32", "scoring": "1"}


@dataclass(frozen=True)
class Data:
    """Rows and tokenized pairs: old ones, all, and the new ones alone."""

    runner: JobRunner
    policies: list[Path]
    base: Path
    old: tuple[Artifact, Artifact]
    everything: tuple[Artifact, Artifact]
    new: tuple[Artifact, Artifact]


def prepare(folder: Path, data: Path) -> Data:
    """Write the rows and the policies, and tokenize."""
    rows = json.loads((data / "preferences" / "rasbt.instruction-data-with-preference.json").read_text())
    cut, base, runner = round(len(rows) * (1 - NEW)), data / "models" / "tiny-chat", JobRunner(folder)
    made = []
    for name, part in (("old", rows[:cut]), ("all", rows), ("new", rows[cut:])):
        file = folder / f"{name}.json"
        file.write_text(json.dumps(part))
        raw = runner.read(file, 0.1)
        made.append((raw, runner.tokenize(raw, base, _RULES)))
    return Data(runner, [_variant(base, folder / f"policy-{n}", n) for n in range(POLICIES)], base, *made)


def _variant(base: Path, folder: Path, seed: int) -> Path:
    """Write a model with slightly other weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    for parameter in model.parameters():
        parameter.data += 1e-3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def prequential_job(data: Data) -> Job:
    """Return the job that scores the new pairs with all policies. The reference's log-probs are known, as in a run."""
    inputs: dict[str, Artifact | Path] = {
        "raw_preferences": data.everything[0],
        "tokenized_pairs:all": data.everything[1],
        "raw_preferences:old": data.old[0],
        "tokenized_pairs:old": data.old[1],
        "reference_model:base": data.base,
        **{f"policy:{n}": folder for n, folder in enumerate(data.policies)},
    }
    common = {
        "reference": "reference_model:base",
        "pairs": "tokenized_pairs:all",
        "loss": {},
        "seen_rows": ["raw_preferences:old"],
        "seen_pairs": ["tokenized_pairs:old"],
    }
    policies = [{**common, "policy": f"policy:{n}"} for n in range(POLICIES)]
    settings = {**_SCORING, "champion": "c" * 64, "policies": policies}
    return data.runner.job("prequential", "prequential_scores", inputs, settings)


def reference_job(data: Data, model: Path, pairs: Artifact) -> Job:
    inputs: dict[str, Artifact | Path] = {"tokenized_pairs": pairs, "reference_model": model}
    return data.runner.job("reference", "reference_logprobs", inputs, _SCORING)


def cpu_seconds_of(job: Job, threads: int) -> float:
    """Run the job in a process of its own. Return its CPU-seconds, starting included."""
    found = run("measured", str(job.path), threads=threads)
    return found["cpu_seconds"] + found["imports_cpu_seconds"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(Path(folder), arguments.data.resolve())
        JobRunner.run(reference_job(data, data.base, data.everything[1]))
        ours = cpu_seconds_of(prequential_job(data), arguments.threads)
        # A fresh store: ours has filled the cache of each policy.
        (Path(folder) / "peer").mkdir()
        peer = prepare(Path(folder) / "peer", arguments.data.resolve())
        theirs = [
            cpu_seconds_of(reference_job(peer, policy, peer.new[1]), arguments.threads) for policy in peer.policies
        ]
    rows = [
        ["", "CPU-s"],
        [f"one job, {POLICIES} policies", f"{ours:.1f}"],
        [f"{POLICIES} jobs, one policy each", f"{sum(theirs):.1f}"],
        ["ratio", f"{ours / sum(theirs):.2f}"],
    ]
    sys.stdout.write(f"{machine(arguments.threads)}\n\n{table(rows)}\n")
    return int(ours > sum(theirs))


if __name__ == "__main__":
    sys.exit(main())
