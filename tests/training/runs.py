"""Runs of preference tuning: their settings, a run in this process, its events, and a naive loop to compare with."""

import json
import math
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import factories
from training.contract.config.training import Training
from training.contract.protocol.details import PolicyDetails
from training.contract.protocol.events import EventWriter, read_events
from training.contract.protocol.job import Job
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.logprob_table import LogProbTable
from training.contract.store.store import Store
from training.data.tokenization.batch_sampler import epoch_order
from training.distributed import Group
from training.jobs.policy import run

SIDES = ("chosen", "rejected")
BETA, RATE, CLIP = 0.5, 3e-3, 1.0
TIMED = {"time", "tokens_per_second", "peak_memory_mb"}


def settings(**changes: Any) -> dict[str, Any]:
    fields = {
        "loss": {"beta": BETA},
        "batch_size": 8,
        "micro_tokens": 128,
        "optimizer": {"learning_rate": RATE, "weight_decay": 0.1},
        "schedule": {"type": "constant", "warmup_ratio": 0.0},
        "max_grad_norm": CLIP,
        "max_steps": 12,
    }
    return Training.model_validate(fields | changes).model_dump(mode="json")


def tune(job: Job) -> JobResult[PolicyDetails]:
    return run(factories.context(job, events=EventWriter(job.events, keep=True)))


def told(of: Job | Artifact[Any], *kinds: str) -> list[dict[str, Any]]:
    """Return the events of these kinds, by default the steps. A published policy holds the events of its job."""
    return [
        cast(dict[str, Any], e) for e in read_events(of.folder / "events.jsonl") if e["event"] in (kinds or ("step",))
    ]


def losses(of: Job | Artifact[Any]) -> list[float]:
    return [e["loss"] for e in told(of)]


def timeless(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events without the fields that depend on clock or memory."""
    return [{name: value for name, value in event.items() if name not in TIMED} for event in events]


def naive_losses(inputs: Any, steps: int, model: torch.nn.Module | None = None) -> Iterator[float]:
    """Yield the losses of DPO by its paper: one unpadded sequence at a time, with torch's AdamW and clipping.

    Only the order of the data is ours. `model` is the reference model; its parameters with gradients are trained.
    """
    model = model or AutoModelForCausalLM.from_pretrained(inputs.model)
    table = load_file(inputs.reference / "logprobs.safetensors")
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim > 1]
    spared = [p for p in trained if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, foreach=False)
    train = inputs.split("train")
    per_epoch = math.ceil(len(train) / 8)
    for step in range(steps):
        order = epoch_order(len(train), 0, step // per_epoch)[step % per_epoch * 8 :][:8]
        total = torch.zeros(())
        for i in order:
            chosen, rejected = (inputs.plain_logprob(model, train[i], side) for side in SIDES)
            margin = BETA * ((chosen - table["chosen_logprobs"][i]) - (rejected - table["rejected_logprobs"][i]))
            total = total - torch.nn.functional.logsigmoid(margin)
        optimizer.zero_grad()
        (total / len(order)).backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        yield total.item() / len(order)


def published(job: Job, statuses: list[int]) -> Artifact[Any]:
    """Return the artifact of `job`. Its forked ranks must have ended with status 0."""
    assert set(statuses) == {0}, job.log.read_text()[-3000:]
    found = Store(job.store).find(job.artifact, job.derivation.key)
    assert found is not None
    return found


def on_two_ranks(place: Path, work: Callable[[Group], Any]) -> list[Any]:
    """Return the results of `work` on two real ranks, connected by gloo: forks of this process."""
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            try:
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                store, patience = dist.FileStore(str(place / "ranks"), 2), timedelta(minutes=1)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
                (place / f"rank-{rank}.json").write_text(json.dumps(work(Group(rank, 2, torch.device("cpu")))))
                dist.destroy_process_group()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    return [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(2)]


def shift_reference(inputs: Any, row: int, nats: float) -> None:
    """Make one log-prob of the reference table wrong."""
    table = LogProbTable.read(inputs.reference, len(inputs.examples))
    table.logprobs_P2[row, 0] += nats
    table.write(inputs.reference)
