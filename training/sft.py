"""The `sft` job: supervised tuning on the chosen responses of the train split, which makes the reference model.

The loss is the mean negative log-prob over all response tokens of the global batch, so long responses weigh more than
short ones, as everywhere in language modelling. Stepping, resuming and saving are those of preference tuning. The pair
that carries a chosen response is the item; a response that several pairs share is trained on as often.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from training.contract.events import EventWriter
from training.contract.job import Job
from training.contract.recipe import SupervisedTuning
from training.contract.store import Made
from training.data.batches import Pairs
from training.data.packing import Batches, MicroBatch, Positions, Tokens, train_items
from training.distributed import Group
from training.model.logprobs import LaidOut, lay_out_for, logprobs_of
from training.model.prepare import prepare_for_training
from training.model.selfcheck import demand_exact
from training.parallel.choice import build_masters
from training.parallel.source import Untrained
from training.stepper import Stepper
from training.trainer import Trainer, write_model


class ResponseObjective:
    """The mean negative log-prob of the chosen responses' tokens."""

    names: tuple[str, ...] = ("loss",)

    def __init__(self, pairs: Pairs) -> None:
        self._pairs, self._rows = pairs, pairs.rows

    def count(self, items: Positions) -> int:
        """Response tokens. None of them is the first of its sequence: every prompt has a token."""
        return sum(int(self._pairs.sequence(int(item), "chosen").mask_T.sum()) for item in items)

    def rows(self, items: Positions) -> Positions:
        return self._rows[items]

    def prepare(self, model: PreTrainedModel, batch: Positions, parts: Sequence[MicroBatch]) -> None:
        """Nothing: an item's loss depends on no other's."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing: there is no state."""

    def lay_out(self, model: PreTrainedModel, items: Positions) -> LaidOut:
        return lay_out_for(model, [self._pairs.sequence(int(item), "chosen") for item in items])

    def values_IM(self, model: PreTrainedModel, ready: LaidOut) -> Tensor:
        return -logprobs_of(model, ready).sums_S[:, None]


def run(job: Job, group: Group, events: EventWriter) -> Made:
    """Tune the base model and write it into `job.staging`. Raises TrainingError where the run must not go on."""
    events.phase("loading the base model")
    started = time.perf_counter()
    settings = SupervisedTuning.model_validate(job.settings)
    pairs = Pairs.open(job.inputs["tokenized_pairs"].folder)
    untrained = Untrained(job.inputs["base_model"].folder, "float32")
    masters = build_masters(untrained, job.compute.parallel, group, events)
    pairs.demand_known_tokens(masters.model.config.vocab_size)
    demand_exact(masters.model, events, masters.dtype, training=masters.has_dropout)
    prepare_for_training(masters.model, job.compute, events, masters.has_dropout)
    lengths_I = pairs.lengths("chosen").astype(np.int64)
    batches = Batches(
        train_items(pairs), Tokens(lengths_I, lengths_I), settings.batch_size, settings.micro_tokens, settings.seed
    )
    steps = settings.epochs * batches.steps_per_epoch
    stepper = Stepper(masters, ResponseObjective(pairs), batches, settings, steps, group)
    trainer = Trainer(job, group, events, stepper, ("loss",))
    trainer.took("loading", time.perf_counter() - started)
    trainer.run()
    events.phase("saving the reference model")
    with trainer.timed("saving"):
        fingerprint = write_model(job, masters, job.inputs["base_model"])
    return Made(fingerprint, trainer.facts | {"pairs": len(batches.items), "world": group.world})
