"""The `policy` job: preference tuning of the reference model, from the reference's log-probs in a table.

    load      pairs, table, and the reference model, or the champion, as the policy to be; its log-probs must be those of
              plain transformers
    prove     before the first step, on the first batch, on pairs spread over the others and on those held out, the loss of
              the reference model is that of zero margin, and each log-prob that of the table (training.proof). It is the
              policy as it starts; where that is the champion, the reference model is loaded for the proof alone
    train     steps, held-out metrics every `evaluate_every` of them, checkpoints (training.trainer, training.stepper)
    save      a Hugging Face folder in the precision that was trained, or its adapter alone, with the tokenizer and an
              account of the run

The same code runs in one process or in many; results differ by rounding only.
"""

import gc
import json
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
from training.contract.logprob_table import LogProbTable
from training.contract.recipe import TrainingSpec
from training.contract.store import Made
from training.data.packing import Batches, Positions, train_items
from training.data.tokenized import Pairs
from training.distributed import Group
from training.model.prepare import prepare_for_training
from training.model.selfcheck import demand_exact
from training.objective import PreferenceObjective, pair_tokens
from training.parallel.choice import build_masters
from training.parallel.masters import Masters
from training.parallel.models import FrozenModel, TrainableModel
from training.proof import Proof, evenly_spaced, prove_zero_margin
from training.scored_pairs import ScoredPairs, score_pairs
from training.stepper import Stepper
from training.tails import with_tails
from training.trainer import Trainer, write_model

_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
_PROVEN_PAIRS = 16


def run(job: Job, group: Group, events: EventWriter) -> Made:
    """Train the policy and write it into `job.staging`. Raises TrainingError where the run must not go on."""
    events.phase("loading the model that becomes the policy")
    started = time.perf_counter()
    tuning = _Tuning(job, group, events)
    tuning.trainer.took("loading", time.perf_counter() - started)
    tuning.trainer.run(tuning.observe)
    events.phase("saving the policy")
    return tuning.save()


class _Tuning:
    """The parts of one run, and what is done with them before, between and after its steps."""

    def __init__(self, job: Job, group: Group, events: EventWriter) -> None:
        self.job, self.group, self.events = job, group, events
        self.settings = TrainingSpec.model_validate(job.settings)
        self.start = self._start()
        self.pairs = Pairs.open(job.inputs["tokenized_pairs"].folder)
        self.reference = self._table()
        self.masters = self._masters()
        objective = PreferenceObjective(self.pairs, self.reference, self.settings.loss, group)
        self.batches = self._batches()
        self.steps = steps = self.settings.max_steps or self.settings.epochs * self.batches.steps_per_epoch
        stepper = Stepper(self.masters, objective, self.batches, self.settings, steps, group)
        self.trainer = Trainer(job, group, events, stepper, ("loss", *_REWARDS))
        self.held_out = self.pairs.indices("validation")

    def observe(self, step: int) -> None:
        """Held-out metrics when they are due; before the first step the proof as well."""
        if step == 0:
            self._prove_table()
        if step % self.job.compute.evaluate_every == 0 or step == self.steps:
            self._evaluate(step)

    def save(self) -> Made:
        """Write the policy's folder, on rank 0, which alone can tell the fingerprint of what it wrote."""
        staging = self.job.staging
        with self.trainer.timed("saving"):
            fingerprint = write_model(self.job, self.masters, self.start, self.settings.adapter)
        if not self.group.is_main:
            return Made(fingerprint)
        account = self._account()
        written = {"training.json": self.job.settings, "recipe.json": self.job.recipe, "metrics.json": account}
        for name, content in written.items():
            (staging / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        if self.job.events.is_file():
            shutil.copyfile(self.job.events, staging / "events.jsonl")
        return Made(fingerprint, account)

    def _start(self) -> Input:
        """What the policy is before the first step: the champion, where the spec names one, or the reference model."""
        if self.settings.champion is None:
            return self.job.inputs["reference_model"]
        folder = Path(self.job.locations["champion"])
        return Input(kind="champion", fingerprint=self.settings.champion, folder=folder)

    def _table(self) -> LogProbTable:
        table = LogProbTable.read(self.job.inputs["reference_logprobs"].folder, len(self.pairs))
        if not self.settings.loss.needs_token_logprobs:
            return table
        return with_tails(table, self.pairs, np.arange(len(self.pairs)), self.job, self.group, self.events)

    def _masters(self) -> Masters:
        """The policy to be, ready for steps."""
        settings, compute = self.settings, self.job.compute
        trainable = TrainableModel(self.start.folder, settings.precision, settings.adapter, settings.seed)
        masters = build_masters(trainable, compute.parallel, self.group, self.events)
        demand_exact(masters.model, self.events, masters.dtype, training=masters.has_dropout)
        float8 = settings.head_precision == "float8"
        prepare_for_training(masters.model, compute, self.events, masters.has_dropout, float8)
        return masters

    def _batches(self) -> Batches:
        settings, items = self.settings, train_items(self.pairs)
        tokens = pair_tokens(self.pairs)
        return Batches(items, tokens, settings.batch_size, settings.micro_tokens, settings.seed)

    def _prove_table(self) -> None:
        """The train split; and where the policy starts as another model, so that its evaluation proves nothing, the other."""
        self.events.phase("proof of step 0")
        with self.trainer.timed("proof"):
            frozen, first = self._reference_model(), self.batches.batch(1)
            proof = self._prove(self._scored(first, frozen), "the first batch")
            self.trainer.facts |= {f"step0_{name}": value for name, value in asdict(proof).items()}
            others = evenly_spaced(np.setdiff1d(self.batches.items, first), _PROVEN_PAIRS)
            if len(others):
                self._prove(
                    self._scored(others, frozen), f"{len(others)} pairs spread over those after the first batch"
                )
            if self._starts_apart and len(self.held_out):
                self._prove(self._scored(evenly_spaced(self.held_out, _PROVEN_PAIRS), frozen), "held-out pairs")
            del frozen
            if self._starts_apart:
                gc.collect()  # its parts refer to each other, and training wants the memory

    @property
    def _starts_apart(self) -> bool:
        return self.start is not self.job.inputs["reference_model"]

    def _reference_model(self) -> PreTrainedModel:
        """The model that made the table: the policy, as long as it has learned nothing, or one that is gone after the proof.

        That one lies on the ranks as the policy does: there is room beside it, since no moments are kept yet.
        """
        if not self._starts_apart:
            return self.masters.model
        return self.masters.layout.place(FrozenModel(self.job.inputs["reference_model"], self.reference.dtype).load)

    def _prove(self, scored: ScoredPairs, where: str) -> Proof:
        return prove_zero_margin(scored, self.reference, self.settings, where)

    def _evaluate(self, step: int) -> None:
        if not len(self.held_out):
            return
        with self.trainer.timed("evaluation"):
            scored = self._scored(self.held_out, self.masters.model)
            if step == 0 and not self._starts_apart:
                self._prove(scored, "the held-out pairs")
        self.trainer.facts["eval"] = scored.metrics()
        self.events.emit("eval", step=step, **scored.metrics())

    def _scored(self, positions: Positions, model: PreTrainedModel) -> ScoredPairs:
        """The pairs under `model` as it is now. Its progress is not shown: it would hide the training's."""
        model.eval()
        loss, silent = self.settings.loss, EventWriter(None)
        return score_pairs(model, self.pairs, positions, self.reference, loss, self.group, silent)

    def _account(self) -> dict[str, Any]:
        """What is told of the run: last metrics on both splits, counts, seconds, and the course of the rewards."""
        facts = self.trainer.facts
        rewards = [value for name in _REWARDS for value in facts["series"][name]]
        counts = {"train": len(self.batches.items), "validation": len(self.held_out)}
        return {**facts, "pairs": counts, "rewards_finite": all(map(math.isfinite, rewards)), "world": self.group.world}
