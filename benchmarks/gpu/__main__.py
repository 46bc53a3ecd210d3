"""Training on a GPU, this project and TRL: `python -m benchmarks.gpu`.

A Llama of 1.1 billion random parameters, made-up pairs in batches of 16, in micro-batches of 4,096 tokens, bfloat16 with
float32 master weights, AdamW; no activation is computed twice. Every side is a process of its own: our training job eager and
compiled, TRL with its chunked head, and TRL with Liger's kernels (the extra `bench-gpu`). Our side is the real job, with
deterministic algorithms and the reference check.

    tokens/s      of both sequences of each pair, prompts twice, without padding: the same count for every side
    utilisation   model FLOPs / (seconds x the chip's dense bfloat16 peak), model FLOPs = 6 W T + 6 V H R + 12 L D S:
                  W weights of the layers, T tokens, V H of the head, R response tokens, L layers, D width of all query
                  heads, S pairs of a token and one that it sees (causal). "least" with each prompt once, as our side
                  runs; "as usual" with each prompt twice, as a trainer without shared prefixes runs
    peak          most memory that torch held on the device, in GiB

The first three steps warm up and are not counted. Before the costs the command prints the error of both ways of attention
against float64 on the same bfloat16 operands. After them it prints the differences step by step: compiled from eager, and
TRL from ours.

Each side's result is appended to `--record` as a line of JSON. A side that fails, or takes more than `--side-seconds`, is
left out with its error.

`--size tiny --device cpu` runs everything but the kernels on a processor in float32.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.attention import errors
from benchmarks.gpu.setting import END, SIZES, WARM_UP, Size, made_up, peak_of, word, write_texts
from benchmarks.operations import least
from benchmarks.setting import Failed, machine, run, table
from benchmarks.workload import (
    ON_CPU,
    Workload,
    batches,
    policy_job,
    publish_pairs,
    reference_job,
    training_settings,
)
from tests import factories
from training.contract.protocol.events import read_events
from training.contract.protocol.job import Job
from training.contract.store.artifact import Artifact
from training.contract.store.store import Store
from training.data.tokenization.pair_dataset import Pairs

Told = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """The result of one side: its steps, with the time at the end of each, and its peak of memory."""

    name: str
    steps: list[Told]
    peak_mb: float

    @property
    def seconds(self) -> float:
        """Return the seconds of all counted steps."""
        return float(self.steps[-1]["time"] - self.steps[WARM_UP - 1]["time"])


def prepare(size: Size, workload: Workload) -> Artifact[Any]:
    """Prepare the model, the pairs, and the pairs as text in the order of our job."""
    torch.manual_seed(0)
    config = configuration(size)
    LlamaForCausalLM(config).save_pretrained(workload.base)
    words = [word(token) for token in range(size.vocabulary)]
    factories.word_tokenizer(words, eos_token=word(END), pad_token=word(END)).save_pretrained(workload.base)
    made = made_up(size)
    artifact = publish_pairs(made, Store(workload.folder / "store"), {"size": str(size)})
    pairs, steps = Pairs.open(artifact.folder), batches_of(size, artifact)
    write_texts(
        [made[pairs.rows[item]] for step in range(1, size.steps + 1) for item in steps.batch(step)], workload.folder
    )
    return artifact


def configuration(size: Size) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    )


def batches_of(size: Size, pairs: Artifact[Any]) -> Any:
    return batches(Pairs.open(pairs.folder), training_settings(size.micro_tokens, batch_size=size.batch))


def sides(size: Size, workload: Workload, pairs: Artifact[Any], arguments: argparse.Namespace) -> Iterator[Side]:
    """Yield the sides in turn, and print why one is left out. Raises Failed if ours, eager, fails."""
    limits = {"threads": arguments.threads, "seconds": arguments.side_seconds}
    scoring = reference_job(workload, pairs, arguments.precision)
    run("measured", str(scoring.path), **limits)
    scored = Store(scoring.store).find(scoring.artifact, scoring.derivation.key)
    assert scored is not None
    peer = [str(workload.folder), "--size", arguments.size, "--device", arguments.device]
    peer += ["--precision", arguments.precision]
    ways: dict[str, Callable[[], Side]] = {
        "ours, eager": lambda: ours("ours, eager", size, workload, pairs, scored, arguments),
        "ours, compiled": lambda: ours("ours, compiled", size, _compiled(workload), pairs, scored, arguments),
        "TRL": lambda: Side("TRL", **run("gpu.peer", *peer, **limits)),
        "TRL with Liger": lambda: Side("TRL with Liger", **run("gpu.peer", *peer, "--liger", **limits)),
    }
    if arguments.device != "cuda" or not find_spec("liger_kernel"):
        del ways["TRL with Liger"]
        sys.stdout.write("TRL with Liger is left out: it needs a GPU and the extra `bench-gpu`\n")
    for name, way in ways.items():
        try:
            yield way()
        except Failed as failed:
            if name == "ours, eager":
                raise
            sys.stdout.write(f"{name} is left out: {failed}\n")


def _compiled(workload: Workload) -> Workload:
    return replace(workload, compute=workload.compute.model_copy(update={"compile": True}))


def ours(
    name: str,
    size: Size,
    workload: Workload,
    pairs: Artifact[Any],
    scored: Artifact[Any],
    arguments: argparse.Namespace,
) -> Side:
    """Run the training job and, if requested, profile the device in a step of it."""
    changes = {"batch_size": size.batch, "precision": arguments.precision, "seed": 0}
    job = policy_job(workload, pairs, scored, size.micro_tokens, **changes)
    limits = {"threads": arguments.threads, "seconds": arguments.side_seconds}

    def fresh(place: Path) -> Job:
        """Empty the store of results: with another `compute` alone a job would be done already."""
        return job.model_copy(update={"folder": place, "store": place / "store"})

    measured = fresh(workload.folder / name)
    run("measured", str(measured.write()), **limits)
    steps = [cast(Told, event) for event in read_events(measured.events) if event["event"] == "step"]
    if arguments.profile:
        profiled = fresh(workload.folder / f"{name}, profiled")
        sys.stdout.write(f"{name}\n{table(run('gpu.profile', str(profiled.write()), **limits))}\n")
    return Side(name, steps, steps[-1]["peak_memory_mb"])


def shown(found: list[Side], size: Size, pairs: Artifact[Any], peak: float | None) -> str:
    """Return the table of the costs of each side, and their ratio to ours, eager."""
    counted = batches_of(size, pairs)
    tokens = sum(counted.tokens(step) for step in range(WARM_UP + 1, size.steps + 1))
    with torch.device("meta"):
        model = LlamaForCausalLM(configuration(size))
    part = (size.steps - WARM_UP) / size.steps  # all batches are alike
    work = [part * least(model, Pairs.open(pairs.folder), prompts) for prompts in (1, 2)]
    head = ["", "tokens/s (ours, eager, is)", "utilisation, least", "as usual", "peak, GiB (ours, eager, is)"]
    rows, first = [head], found[0]
    for side in found:
        used = [f"{flops / side.seconds / peak:.1%}" if peak else "" for flops in work]
        speed = f"{tokens / side.seconds:,.0f} ({side.seconds / first.seconds:.2f})"
        rows.append([side.name, speed, *used, f"{side.peak_mb / 1024:.2f} ({first.peak_mb / side.peak_mb:.2f})"])
    return table(rows)


def differences(found: list[Side]) -> str:
    """Return the largest difference of a step from ours, eager: of the loss, and of the norm relative to it."""
    rows = [["against ours, eager", "loss", "norm of the gradient"]]
    for side in found[1:]:
        steps = list(zip(found[0].steps, side.steps, strict=True))
        loss = max(abs(one["loss"] - other["loss"]) for one, other in steps)
        norm = max(abs(one["grad_norm"] / other["grad_norm"] - 1) for one, other in steps)
        rows.append([side.name, f"{loss:.1e}", f"{norm:.1e}"])
    return table(rows)


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), help="bfloat16 on a GPU, float32 else")
    parser.add_argument("--peak-tflops", type=float, help="dense, in bfloat16; known of some chips by their name")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--side-seconds", type=float, help="how long one process may take; no limit without it")
    parser.add_argument("--profile", action="store_true", help="also profile the device in a step of our side")
    parser.add_argument("--record", type=Path, help="a file that each side's steps are added to")
    arguments = parser.parse_args()
    arguments.precision = arguments.precision or ("bfloat16" if arguments.device == "cuda" else "float32")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; `--size tiny --device cpu` shows that the benchmark itself works")
    return arguments


def _record(side: Side, file: Path | None) -> None:
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(side)) + "\n")


def main() -> int:
    arguments = arguments_of()
    size, chip = SIZES[arguments.size], torch.cuda.get_device_name() if arguments.device == "cuda" else ""
    peak = arguments.peak_tflops * 1e12 if arguments.peak_tflops else peak_of(chip)
    sys.stdout.write(f"{chip or 'no GPU'}; {machine(arguments.threads)}\n\n")
    sys.stdout.write(table([["attention against float64", "values", "gradients"], *errors(arguments.device)]) + "\n")
    found: list[Side] = []
    with tempfile.TemporaryDirectory() as folder:
        workload = Workload(Path(folder), ON_CPU.model_copy(update={"device": arguments.device}))
        pairs = prepare(size, workload)
        for side in sides(size, workload, pairs, arguments):
            found.append(side)
            _record(side, arguments.record)
            sys.stdout.write(f"{shown(found, size, pairs, peak)}\n")
            sys.stdout.flush()
    sys.stdout.write(differences(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
