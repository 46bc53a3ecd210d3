"""Reading and tokenizing against TRL's preparation of the same file: `python -m benchmarks.preparation DATA`.

The rows are real multi-turn pairs, repeated with other last prompts until there are enough. The tokenizer is qwen2.5 with its
own template. Ours are the jobs `preferences` and `pairs`, from the file to the published artifacts, with all checks. TRL's part
loads the file with `datasets` and tokenizes it (`DPOTrainer._prepare_dataset`). Both run on one core. A figure per pair is the
difference between two sizes, so start-up does not count.

Then 5% of new rows are added. At last, our part alone runs on more and more rows. Exit status 1 above a limit.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from benchmarks.setting import machine, run, table
from tests.training.job_runner import NAMED, JobRunner, hashes_of, locations_of
from training.contract.config.recipe import Tokenization
from training.contract.protocol.job import Job
from training.contract.store.artifact import Artifact
from training.contract.store.store import Store

TOKENIZER = "qwen2.5"
MAX_LENGTH = 2048
SMALL, LARGE, NEW = 2_000, 20_000, 0.05
MOST_OF_TRL = 0.55
MOST_FOR_NEW = 0.2
MOST_GROWTH_BYTES = 500  # of memory for each pair


@dataclass(frozen=True)
class Cost:
    """The cost of both jobs. `peak_mb` leaves out the processes that only encode."""

    reading: float
    tokenizing: float
    peak_mb: float

    @property
    def seconds(self) -> float:
        return self.reading + self.tokenizing


def write_rows(data: Path, file: Path, rows: int) -> None:
    lines = (data / "preferences-real.jsonl").read_text(encoding="utf-8").splitlines()
    with file.open("w", encoding="utf-8") as out:
        out.writelines(islice(_repeated(lines), rows))


def _repeated(lines: list[str]) -> Iterator[str]:
    for round_ in count():
        for line in lines:
            row = json.loads(line)
            if round_:
                row["prompt"][-1]["content"] += f" ({round_})"
            yield json.dumps(row) + "\n"


def prepare(job_runner: JobRunner, tokenizer: Path, rows: Path) -> Cost:
    """Run both jobs on the file, each in a process of its own, in one store."""
    settings = {"formats": ["auto"], "held_out": [False], "duplicates": "keep", "validation_fraction": 0.1}
    where = locations_of([{"path": str(rows), "format": "auto"}])
    read, raw = _measured(job_runner.job("preferences", "raw_preferences", job_runner.source(), settings, where))
    rules = Tokenization(max_length=MAX_LENGTH).model_dump(exclude={"tokenizer", "chat_template"})
    spec_where = {"tokenizer": str(tokenizer), "chat_template": None, "named": NAMED}
    _, spec = _measured(job_runner.job("tokenizer", "tokenization_spec", {}, rules | hashes_of(tokenizer), spec_where))
    inputs: dict[str, Artifact[Any] | Path] = {"raw_preferences": raw, "tokenization_spec": spec}
    tokenized, _ = _measured(job_runner.job("pairs", "tokenized_pairs", inputs, {}, {"named": NAMED}))
    return Cost(read["cpu_seconds"], tokenized["cpu_seconds"], max(read["peak_mb"], tokenized["peak_mb"]))


def _measured(job: Job) -> tuple[dict[str, Any], Artifact[Any]]:
    cost = run("measured", str(job.path), threads=1)
    made = Store(job.store).find(job.artifact, job.derivation.key)
    assert made is not None
    return cost, made


def per_thousand(large: float, small: float) -> float:
    """Return CPU-seconds for 1,000 pairs."""
    return (large - small) / (LARGE - SMALL) * 1000


def against_trl(data: Path, folder: Path) -> bool:
    """Print our cost beside TRL's, and the cost of new rows. Return whether all ratios are within their limits."""
    tokenizer = data / "tokenizers" / TOKENIZER
    files = {rows: folder / f"{rows}.jsonl" for rows in (SMALL, LARGE, round(LARGE * (1 + NEW)))}
    for rows, file in files.items():
        write_rows(data, file, rows)
    stores = {rows: JobRunner(folder / str(rows)) for rows in (SMALL, LARGE)}
    ours = {rows: prepare(store, tokenizer, files[rows]) for rows, store in stores.items()}
    trl = {
        rows: run("preparation_peer", str(tokenizer), str(files[rows]), str(MAX_LENGTH), threads=1) for rows in stores
    }
    more = max(files)
    added = prepare(stores[LARGE], tokenizer, files[more])
    start_up = ours[SMALL].seconds - per_thousand(ours[LARGE].seconds, ours[SMALL].seconds) * SMALL / 1000
    cold = per_thousand(ours[LARGE].seconds, ours[SMALL].seconds)
    peer = per_thousand(trl[LARGE]["cpu_seconds"], trl[SMALL]["cpu_seconds"])
    share, share_of_new = cold / peer, (added.seconds - start_up) / (cold * more / 1000)
    lines = [
        ["1,000 pairs, CPU-s", "ours", "TRL"],
        ["reading", f"{per_thousand(ours[LARGE].reading, ours[SMALL].reading):.3f}", ""],
        ["tokenizing", f"{per_thousand(ours[LARGE].tokenizing, ours[SMALL].tokenizing):.3f}", ""],
        ["all", f"{cold:.3f} ({share:.2f} of TRL, at most {MOST_OF_TRL})", f"{peer:.3f}"],
        ["peak memory, MB", f"{ours[LARGE].peak_mb:,.0f}", f"{trl[LARGE]['peak_mb']:,.0f}"],
    ]
    sys.stdout.write(table(lines))
    sys.stdout.write(
        f"{more - LARGE:,} new rows beside {LARGE:,}: {added.reading:.1f} + {added.tokenizing:.1f} CPU-s, "
        f"{share_of_new:.2f} of a cold pass without start-up (at most {MOST_FOR_NEW})\n"
    )
    return share <= MOST_OF_TRL and share_of_new <= MOST_FOR_NEW


def growth(data: Path, folder: Path, sizes: list[int]) -> bool:
    """Print the cost of growing numbers of rows. Return whether memory stays nearly the same."""
    rows = [["pairs", "reading, CPU-s", "tokenizing, CPU-s", "peak, MB"]]
    costs = {}
    for size in sizes:
        write_rows(data, file := folder / f"{size}.jsonl", size)
        cost = costs[size] = prepare(JobRunner(folder / f"growth{size}"), data / "tokenizers" / TOKENIZER, file)
        rows.append([f"{size:,}", f"{cost.reading:.1f}", f"{cost.tokenizing:.1f}", f"{cost.peak_mb:,.0f}"])
    grown = (costs[sizes[-1]].peak_mb - costs[sizes[0]].peak_mb) * 2**20 / (sizes[-1] - sizes[0])
    sys.stdout.write(f"{table(rows)}memory grows by {grown:.0f} bytes a pair (at most {MOST_GROWTH_BYTES})\n")
    return grown <= MOST_GROWTH_BYTES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[40_000, 160_000], help="sizes of the last part")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.stdout.write(machine(1) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        is_cheap = against_trl(arguments.data, Path(folder))
        sys.stdout.write("\n")
        return int(not (growth(arguments.data, Path(folder), arguments.rows) and is_cheap))


if __name__ == "__main__":
    sys.exit(main())
