"""The `policy` job: preference tuning of the reference model, whose log-probs come from a table.

    prove     before the first step, the model that made the table must still give its log-probs: on the first batch, on pairs
              spread over the others, and on held-out ones (training.scoring.reference_check)
    load      the model that becomes the policy: the reference model, or the champion; its log-probs must be those of plain
              transformers (training.model.logprobs.self_check)
    train     steps, held-out metrics between them, checkpoints (training.loop.trainer, training.loop.train_step)
    save      a Hugging Face folder in the precision that was trained, or its adapter alone, with the tokenizer and a
              summary of the run

A policy that starts as the reference model, in the dtype of the table, made the table: it is proved itself, once it is loaded,
with all that was done to prepare it for training. Where it starts from the champion or in another dtype, the reference model is
loaded for the proof, scored, and gone before the policy is loaded. So the two are never in memory together.

The same code runs in one process or in many; results differ by rounding only.
"""

import gc
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from training.contract.config.recipe import TrainingSpec
from training.contract.errors import TrainingError
from training.contract.identity.tokenizer_files import holds_tokenizer
from training.contract.protocol.events import EventWriter
from training.contract.protocol.input_files import check_inputs_unchanged
from training.contract.protocol.job import Input, Job
from training.contract.store.store import JobResult, write_json
from training.data.templates.tokenization_spec import TOKENIZER_FOLDER
from training.data.templates.tokenizer import foreign_tokens, load_tokenizer
from training.data.tokenization.batch_sampler import BatchSampler, Positions, train_items
from training.data.tokenization.pair_dataset import Pairs
from training.distributed import Group
from training.loop.model_io import load_for_training, write_trained
from training.loop.objective import PreferenceObjective, pair_tokens
from training.loop.run_state import RunState
from training.loop.train_step import TrainStep
from training.loop.trainer import Trainer
from training.model.backbone import check_positions, text_config
from training.model.expert_routing import ExpertBalance
from training.parallel.model_specs import InferenceModelSpec, TrainModelSpec
from training.parallel.strategy import load_frozen
from training.parallel.train_state import TrainableParams
from training.scoring.logprob_tails import read_table
from training.scoring.pairs import ScoredPairs, score_pairs
from training.scoring.reference_check import ReferenceCheck, check_zero_margin, evenly_spaced, logprob_difference

_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
_PROVEN_PAIRS = 16
# Where the recipe does not say how often: every so many steps, or less often, so that held-out metrics between steps cost at
# most this share of what the steps cost. A step costs three forward passes: its backward pass makes twice the products of one.
_EVALUATE_EVERY = 50
_EVALUATION_SHARE = 0.1
_PASSES_OF_A_STEP = 3
_NO_SUCH_CHAMPION = "set `training.start_from: reference` until there is a champion with this tokenizer"


def run(job: Job, group: Group, events: EventWriter) -> JobResult:
    """Train the policy and write it into `job.staging`. Raises TrainingError where the run must not go on."""
    events.phase("reading pairs and reference log-probs")
    tuning = _PolicyJob(job, group, events)
    tuning.trainer.run(tuning.observe)
    events.phase("saving the policy")
    return tuning.save()


class _PolicyJob:
    """The parts of one run, and what is done with them before, between and after its steps.

    `starts_as_reference`: before the first step the policy is the model that made the table, in the same dtype.
    """

    def __init__(self, job: Job, group: Group, events: EventWriter) -> None:
        self.job, self.group, self.events = job, group, events
        self.settings = settings = TrainingSpec.model_validate(job.settings)
        self.record = RunState(job, group, events, ("loss", *_REWARDS))
        self.pairs = Pairs.open(job.inputs["tokenized_pairs"].folder)
        self.held_out = self.pairs.indices("validation")
        items, tokens = train_items(self.pairs), pair_tokens(self.pairs)
        self.batches = BatchSampler(items, tokens, settings.batch_size, settings.micro_tokens, settings.seed)
        self.steps = settings.max_steps or settings.epochs * self.batches.steps_per_epoch
        self.evaluate_every = self._evaluate_every()
        everything = np.arange(len(self.pairs))
        self.reference = read_table(job, self.pairs, everything, settings.loss, group, events)
        self.start = self._start()
        self.starts_as_reference = settings.champion is None and settings.precision == self.reference.dtype
        if self.record.resumed_step is None and not self.starts_as_reference:
            self._prove_apart()
        self.masters = self._load()
        balance = ExpertBalance(settings.router_aux_loss_coef, group) if settings.router_aux_loss_coef else None
        objective = PreferenceObjective(self.pairs, self.reference, settings.loss, group, balance)
        self.stepper = TrainStep(self.masters, objective, self.batches, settings, self.steps)
        self.trainer = Trainer(job, events, self.stepper, self.record)

    def _evaluate_every(self) -> int:
        """How many steps lie between two looks at the held-out pairs."""
        if self.job.compute.evaluate_every is not None:
            return self.job.compute.evaluate_every
        batches, run_I = self.batches, self.batches.lengths.run_I
        passes = _PASSES_OF_A_STEP * min(batches.batch_size, len(batches.items))
        tokens_of_a_step = passes * float(run_I[batches.items].mean())
        affordable = math.ceil(int(run_I[self.held_out].sum()) / (_EVALUATION_SHARE * tokens_of_a_step))
        if affordable > _EVALUATE_EVERY and self.steps > _EVALUATE_EVERY:
            when = (
                f"every {affordable:,} of {self.steps:,} steps"
                if affordable < self.steps
                else "at both ends of the run"
            )
            self.events.note(
                f"held-out metrics are computed {when}, since between steps they may cost a tenth of what the steps cost; "
                "`compute.evaluate_every` sets another number"
            )
        return max(_EVALUATE_EVERY, affordable)

    def _start(self) -> Input:
        """The model that becomes the policy. Raises TrainingError for a champion to which the pairs' tokens mean others."""
        if self.settings.champion is None:
            return self.job.inputs["reference_model"]
        folder = Path(self.job.locations["champion"])
        if holds_tokenizer(folder):  # one that another program registered may hold the model alone
            self._check_same_tokens(folder)
        return Input(kind="champion", fingerprint=self.settings.champion, folder=folder)

    def _check_same_tokens(self, champion: Path) -> None:
        tokenizer = load_tokenizer(self.job.inputs["tokenized_pairs"].folder / TOKENIZER_FOLDER)
        if foreign := foreign_tokens(tokenizer, load_tokenizer(champion)):
            raise TrainingError(
                f"the champion in {champion} was trained with another tokenizer: {len(foreign):,} of the {len(tokenizer):,} "
                f"tokens of the pairs have another number there or none, first {foreign[0]!r}; {_NO_SUCH_CHAMPION}"
            )

    def _load(self) -> TrainableParams:
        self.events.phase("loading the model that becomes the policy")
        settings = self.settings
        trainable = TrainModelSpec(
            self.start.folder,
            settings.precision,
            settings.adapter,
            settings.seed,
            settings.disable_dropout,
            float8_head=settings.head_precision == "float8",
        )
        with self.record.timed("loading"):
            routing = "training" if settings.router_aux_loss_coef else None
            masters = load_for_training(trainable, self.job.compute, self.group, self.events, routing)
        if settings.champion is not None:
            self._check_known_tokens(text_config(masters.model).vocab_size)
            check_positions(masters.model, self.pairs.longest, self.events)
        return masters

    def _check_known_tokens(self, vocabulary: int) -> None:
        """Raise TrainingError for a champion that lacks tokens of the pairs: without a tokenizer, only its size can tell."""
        if (largest := self.pairs.largest_token) >= vocabulary:
            raise TrainingError(
                f"the pairs have tokens up to the number {largest:,}, and the champion in {self.start.folder} has "
                f"{vocabulary:,} tokens: it was trained with another tokenizer; {_NO_SUCH_CHAMPION}"
            )

    def observe(self, step: int) -> None:
        """Before the first step the proof, or how far the policy is from the table; held-out metrics when they are due.

        Pairs stay mapped, so they are compared after each step: no training goes on with others.
        """
        check_inputs_unchanged()
        if step == 0 and self.starts_as_reference:
            self._prove(self.masters.model)
        elif step == 0 and self.settings.champion is None:
            self._note_rounding()
        if len(self.held_out) and (step % self.evaluate_every == 0 or step == self.steps):
            self._evaluate(step)

    def _prove_apart(self) -> None:
        """Prove the table with the reference model, which is gone afterwards. Raises TrainingError."""
        self.events.phase("loading the reference model for the proof of step 0")
        frozen = InferenceModelSpec(self.job.inputs["reference_model"], self.reference.dtype)
        with self.record.timed("proof"):
            model = load_frozen(frozen, self.job.compute.parallel, self.group, self.events)
        self._prove(model)
        del model
        gc.collect()  # its parts form cycles, and the policy needs the memory

    def _prove(self, model: PreTrainedModel) -> None:
        """Compare the table with the model that made it, on some pairs of either split. Raises TrainingError."""
        self.events.phase("proof of step 0")
        first = self.batches.batch(1)
        others = evenly_spaced(np.setdiff1d(self.batches.items, first), _PROVEN_PAIRS)
        held_out = evenly_spaced(self.held_out, _PROVEN_PAIRS)
        with self.record.timed("proof"):
            proof = self._compare(model, first, "the first batch")
            self.record.facts |= {f"step0_{name}": value for name, value in asdict(proof).items()}
            if len(others):
                self._compare(model, others, f"{len(others)} pairs spread over those after the first batch")
            if len(held_out) and not self.starts_as_reference:  # else all of them, when they are first evaluated
                self._compare(model, held_out, "held-out pairs")

    def _compare(self, model: PreTrainedModel, positions: Positions, where: str) -> ReferenceCheck:
        return check_zero_margin(self._score(model, positions), self.reference, self.settings.loss, where)

    def _note_rounding(self) -> None:
        """Rounding is the same for policy and reference, and cancels in their difference, in one dtype only."""
        some = evenly_spaced(self.batches.batch(1), _PROVEN_PAIRS)
        with self.record.timed("proof"):
            apart = logprob_difference(self._score(self.masters.model, some))
        self.record.facts["step0_apart"] = apart
        dtype = self.settings.precision
        self.events.note(
            f"the policy runs in {dtype} and the reference's log-probs are of {self.reference.dtype}: before training they "
            f"are {apart:.2g} nats a response apart, which stays in all rewards; `reference.dtype: {dtype}` avoids it"
        )

    def _evaluate(self, step: int) -> None:
        with self.record.timed("evaluation"):
            scored = self._score(self.masters.model, self.held_out)
            if step == 0 and self.starts_as_reference:
                check_zero_margin(scored, self.reference, self.settings.loss, "the held-out pairs")
        self.record.facts["eval"] = metrics = scored.metrics()
        self.events.emit("eval", step=step, **metrics)

    def _score(self, model: PreTrainedModel, positions: Positions) -> ScoredPairs:
        """The pairs under `model` as it is now. Its progress is not shown: it would hide the training's."""
        model.eval()
        loss, silent = self.settings.loss, EventWriter(None)
        return score_pairs(model, self.pairs, positions, self.reference, loss, self.group, silent)

    def save(self) -> JobResult:
        """Write the policy's folder, on rank 0, which alone knows the fingerprint of what it wrote."""
        staging = self.job.staging
        with self.record.timed("saving"):
            fingerprint = write_trained(self.job, self.masters, self.start, self.settings.adapter)
        if not self.group.is_main:
            return JobResult(fingerprint)
        summary = self._summary()
        write_json(staging / "training.json", self.job.settings)
        write_json(staging / "recipe.json", self.job.recipe)
        write_json(staging / "metrics.json", summary)
        if self.job.events.is_file():
            shutil.copyfile(self.job.events, staging / "events.jsonl")
        return JobResult(fingerprint, summary)

    def _summary(self) -> dict[str, Any]:
        """The run's facts: last metrics on both splits, counts, seconds, and the course of the rewards."""
        facts = self.record.facts
        rewards = [value for name in _REWARDS for value in facts["series"][name]]
        counts = {"train": len(self.batches.items), "validation": len(self.held_out)}
        return {**facts, "pairs": counts, "rewards_finite": all(map(math.isfinite, rewards)), "world": self.group.world}
