"""The `policy` job: preference tuning of the reference model, whose log-probs come from a table.

    load      pairs, table, and the model that becomes the policy: the reference model, or the champion; its log-probs must
              be those of plain transformers (training.model.selfcheck)
    prove     before the first step, the reference model must give the log-probs of the table: on the first batch, on pairs
              spread over the others, and on held-out ones (training.proof). The policy is that model as long as it has
              learned nothing; where it starts from the champion, the reference model is loaded for the proof alone
    train     steps, held-out metrics every `evaluate_every` of them, checkpoints (training.trainer, training.stepper)
    save      a Hugging Face folder in the precision that was trained, or its adapter alone, with the tokenizer and a
              summary of the run

The same code runs in one process or in many; results differ by rounding only.
"""

import gc
import math
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from training.contract.events import EventWriter
from training.contract.job import Input, Job
from training.contract.recipe import TrainingSpec
from training.contract.store import Made, write_json
from training.data.packing import Batches, Positions, train_items
from training.data.tokenized import Pairs
from training.distributed import Group
from training.objective import PreferenceObjective, pair_tokens
from training.parallel.models import FrozenModel, TrainableModel
from training.proof import Proof, evenly_spaced, prove_zero_margin
from training.scored_pairs import ScoredPairs, score_pairs
from training.stepper import Stepper
from training.tails import read_table
from training.trained_model import load_for_training, write_trained
from training.trainer import Trainer

_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
_PROVEN_PAIRS = 16


def run(job: Job, group: Group, events: EventWriter) -> Made:
    """Train the policy and write it into `job.staging`. Raises TrainingError where the run must not go on."""
    events.phase("loading the model that becomes the policy")
    started = time.perf_counter()
    tuning = _Tuning(job, group, events)
    tuning.trainer.add_seconds("loading", time.perf_counter() - started)
    tuning.trainer.run(tuning.observe)
    events.phase("saving the policy")
    return tuning.save()


class _Tuning:
    """The parts of one run, and what is done with them before, between and after its steps."""

    def __init__(self, job: Job, group: Group, events: EventWriter) -> None:
        self.job, self.group, self.events = job, group, events
        self.settings = settings = TrainingSpec.model_validate(job.settings)
        self.from_champion = settings.champion is not None
        self.start = self._start()
        self.pairs = Pairs.open(job.inputs["tokenized_pairs"].folder)
        self.held_out = self.pairs.indices("validation")
        everything = np.arange(len(self.pairs))
        self.reference = read_table(job, self.pairs, everything, settings.loss, group, events)
        trainable = TrainableModel(self.start.folder, settings.precision, settings.adapter, settings.seed)
        float8_head = settings.head_precision == "float8"
        self.masters = load_for_training(trainable, job.compute, group, events, float8_head)
        objective = PreferenceObjective(self.pairs, self.reference, settings.loss, group)
        items, tokens = train_items(self.pairs), pair_tokens(self.pairs)
        self.batches = Batches(items, tokens, settings.batch_size, settings.micro_tokens, settings.seed)
        self.steps = settings.max_steps or settings.epochs * self.batches.steps_per_epoch
        stepper = Stepper(self.masters, objective, self.batches, settings, self.steps)
        self.trainer = Trainer(job, events, stepper, ("loss", *_REWARDS))

    def _start(self) -> Input:
        if self.settings.champion is None:
            return self.job.inputs["reference_model"]
        folder = Path(self.job.locations["champion"])
        return Input(kind="champion", fingerprint=self.settings.champion, folder=folder)

    def observe(self, step: int) -> None:
        """Before the first step the proof; held-out metrics when they are due."""
        if step == 0:
            self._prove_table()
        if len(self.held_out) and (step % self.job.compute.evaluate_every == 0 or step == self.steps):
            self._evaluate(step)

    def _prove_table(self) -> None:
        """Compare the table with the reference model on some pairs of either split. Raises TrainingError."""
        self.events.phase("proof of step 0")
        with self.trainer.timed("proof"):
            model, first = self._reference_model(), self.batches.batch(1)
            proof = self._prove(model, first, "the first batch")
            self.trainer.facts |= {f"step0_{name}": value for name, value in asdict(proof).items()}
            self._note_rounding(proof)
            others = evenly_spaced(np.setdiff1d(self.batches.items, first), _PROVEN_PAIRS)
            if len(others):
                self._prove(model, others, f"{len(others)} pairs spread over those after the first batch")
            if self.from_champion and len(self.held_out):  # else all of them are proved when they are first evaluated
                self._prove(model, evenly_spaced(self.held_out, _PROVEN_PAIRS), "held-out pairs")
            del model
            if self.from_champion:
                gc.collect()  # its parts refer to each other, and training wants the memory

    def _note_rounding(self, proof: Proof) -> None:
        """Rounding is the same for policy and reference, and cancels in their difference, in one dtype only."""
        dtype, of_table = self.settings.precision, self.reference.dtype
        if dtype != of_table and not self.from_champion:
            self.events.note(
                f"the policy runs in {dtype} and the reference's log-probs are of {of_table}: before training they are "
                f"{proof.apart:.2g} nats a response apart, which stays in all rewards; `reference.dtype: {dtype}` avoids it"
            )

    def _reference_model(self) -> PreTrainedModel:
        """The model that made the table: the policy, as long as it has learned nothing, or one that is gone after the proof.

        That one is laid out on the ranks like the policy: there is room beside it, since no moments are kept yet.
        """
        if not self.from_champion:
            return self.masters.model
        return self.masters.layout.place(FrozenModel(self.job.inputs["reference_model"], self.reference.dtype).load)

    def _prove(self, model: PreTrainedModel, positions: Positions, where: str) -> Proof:
        dtype = self.reference.dtype if self.from_champion else self.settings.precision
        return prove_zero_margin(self._score(model, positions), dtype, self.reference, self.settings.loss, where)

    def _evaluate(self, step: int) -> None:
        with self.trainer.timed("evaluation"):
            scored = self._score(self.masters.model, self.held_out)
            if step == 0 and not self.from_champion:
                settings = self.settings
                prove_zero_margin(scored, settings.precision, self.reference, settings.loss, "the held-out pairs")
        self.trainer.facts["eval"] = scored.metrics()
        self.events.emit("eval", step=step, **scored.metrics())

    def _score(self, model: PreTrainedModel, positions: Positions) -> ScoredPairs:
        """The pairs under `model` as it is now. Its progress is not shown: it would hide the training's."""
        model.eval()
        loss, silent = self.settings.loss, EventWriter(None)
        return score_pairs(model, self.pairs, positions, self.reference, loss, self.group, silent)

    def save(self) -> Made:
        """Write the policy's folder, on rank 0, which alone can tell the fingerprint of what it wrote."""
        staging = self.job.staging
        with self.trainer.timed("saving"):
            fingerprint = write_trained(self.job, self.masters, self.start, self.settings.adapter)
        if not self.group.is_main:
            return Made(fingerprint)
        summary = self._summary()
        write_json(staging / "training.json", self.job.settings)
        write_json(staging / "recipe.json", self.job.recipe)
        write_json(staging / "metrics.json", summary)
        if self.job.events.is_file():
            shutil.copyfile(self.job.events, staging / "events.jsonl")
        return Made(fingerprint, summary)

    def _summary(self) -> dict[str, Any]:
        """The run's facts: last metrics on both splits, counts, seconds, and the course of the rewards."""
        facts = self.trainer.facts
        rewards = [value for name in _REWARDS for value in facts["series"][name]]
        counts = {"train": len(self.batches.items), "validation": len(self.held_out)}
        return {**facts, "pairs": counts, "rewards_finite": all(map(math.isfinite, rewards)), "world": self.group.world}
