"""Growth of the cost of two jobs with data and model: `python -m benchmarks.growth`.

Random tokens and a small random Llama (hidden 128, 2 layers, vocabulary 4,096), 64 pairs of a prompt of 64 tokens with two
responses of 64, one epoch in batches of 8, float32 on the CPU. From there each of three quantities grows alone, fourfold
or more. CPU-seconds are the jobs', without imports; peaks are of the whole process, and the head of the table has its memory
before any work (the libraries). Every point is measured twice and the smaller figure counts, because other work on the
machine only adds to it.

Expected growth. In pairs: time linear, memory flat. In the vocabulary: time linear, memory by the weights only (the
parameter, its gradient, two moments, and two temporary gradients, of the embedding and of the head), because logits have a
budget of bytes. In the length of responses: time linear, and quadratic for attention; memory by the tokens of
a micro-batch. `marginal` is the cost of one more unit, from the row before to this one; with linear growth it stays the
same. Exit status 1 if, in pairs or vocabulary, it rises by more than half.
"""

import argparse
import sys
import tempfile
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.setting import machine, run, table
from benchmarks.workload import Workload, policy_job, publish_pairs, reference_job
from tests import factories
from training.contract.config.training import Training
from training.contract.store.store import Store

PROMPT = 64
MOST_RISE = 1.5


@dataclass(frozen=True)
class Point:
    pairs: int = 64
    vocabulary: int = 4096
    response: int = 64


@dataclass(frozen=True)
class Cost:
    reference_seconds: float
    training_seconds: float
    peak_mb: float
    imports_mb: float

    @property
    def seconds(self) -> float:
        return self.reference_seconds + self.training_seconds


AXES = {"pairs": (64, 256, 1024), "vocabulary": (4096, 32_768, 131_072), "response": (64, 256, 1024)}
LINEAR = ("pairs", "vocabulary")


def cost(point: Point, threads: int) -> Cost:
    """Return the smaller of two measurements, figure by figure."""
    return Cost(*map(min, astuple(_measured(point, threads)), astuple(_measured(point, threads))))


def _measured(point: Point, threads: int) -> Cost:
    """Measure the jobs `reference_logprobs` and `policy` at `point`, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        workload = Workload(Path(folder))
        _write_model(point, workload.base)
        pairs = publish_pairs(_made_up(point), Store(workload.folder / "store"), vars(point))
        scoring = reference_job(workload, pairs)
        scored = run("measured", str(scoring.path), threads=threads)
        found = Store(scoring.store).find(scoring.artifact, scoring.derivation.key)
        assert found is not None
        tuning = policy_job(workload, pairs, found, Training().micro_tokens)
        tuned = run("measured", str(tuning.path), threads=threads)
    return Cost(scored["cpu_seconds"], tuned["cpu_seconds"], tuned["peak_mb"], tuned["imports_peak_mb"])


def grow(axis: str, base: Cost, threads: int) -> tuple[str, list[float]]:
    """Return the table of one axis, and the increase of its marginal cost from each row to the next."""
    rows = [[axis, "reference, CPU-s", "training, CPU-s", "peak, MB", "marginal, CPU-ms", "of the one before"]]
    units, before, marginals, rises = AXES[axis], base, [], []
    for at, unit in enumerate(units):
        found = base if at == 0 else cost(replace(Point(), **{axis: unit}), threads)
        row = [f"{unit:,}", f"{found.reference_seconds:.2f}", f"{found.training_seconds:.2f}", f"{found.peak_mb:,.0f}"]
        if at:
            marginals.append((found.seconds - before.seconds) / (unit - units[at - 1]) * 1000)
        if len(marginals) > 1:
            rises.append(marginals[-1] / marginals[-2])
        row += [f"{marginals[-1]:.3f}" if marginals else "", f"{rises[-1]:.2f}" if rises else ""]
        rows.append(row)
        before = found
    return table(rows), rises


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    sys.stdout.write(machine(threads) + "\n")
    base = cost(Point(), threads)
    sys.stdout.write(f"before any work a process holds {base.imports_mb:.0f} MB\n")
    steep = []
    for axis in AXES:
        shown, rises = grow(axis, base, threads)
        sys.stdout.write(f"\n{shown}")
        steep += [axis for rise in rises if axis in LINEAR and rise > MOST_RISE]
    for axis in steep:
        sys.stdout.write(f"MISS  the cost of one more of {axis} rises by more than {MOST_RISE - 1:.0%}\n")
    return int(bool(steep))


def _write_model(point: Point, folder: Path) -> None:
    sizes = {"vocab_size": point.vocabulary, "hidden_size": 128, "intermediate_size": 352}
    model = factories.llama(**sizes, max_position_embeddings=2048, tie_word_embeddings=False)
    model.save_pretrained(folder)


def _made_up(point: Point) -> list[tuple[list[int], list[int], list[int]]]:
    random = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in random.integers(point.vocabulary, size=count)]

    return [(tokens(PROMPT), tokens(point.response), tokens(point.response)) for _ in range(point.pairs)]


if __name__ == "__main__":
    sys.exit(main())
