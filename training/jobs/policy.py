"""The `policy` job: preference tuning of the reference model, whose log-probs come from a table.

    read      the pairs, the table of reference log-probs, the batches, and the model to start from
    check     the model that made the table must still give its log-probs: on the first batch, on pairs spread over the others,
              and on held-out ones (training.scoring.reference_check)
    load      the model that becomes the policy: the reference model, or the champion; its log-probs must be those of plain
              transformers (training.model.logprobs.self_check)
    train     steps, held-out metrics between them, checkpoints (training.loop.trainer, training.loop.train_step)
    save      a Hugging Face folder in the trained precision, or its adapter alone, with the tokenizer and a summary of the run

A policy that starts as the reference model, in the dtype of the table, is the model that made the table. It is checked itself,
after it was loaded and prepared for training. If the policy starts from the champion or in another dtype, the reference model
is loaded, scored and freed before the policy is loaded. So the two are never in memory together.

The same code runs in one process or in many. Results differ by rounding only.
"""

import gc
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from training.contract.errors import TrainingError
from training.contract.identity.tokenizer_files import holds_tokenizer
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Input, Job
from training.contract.store.store import JobResult, write_json
from training.data.templates.tokenization_spec import TOKENIZER_FOLDER
from training.data.templates.tokenizer import foreign_tokens, load_tokenizer
from training.distributed import Group
from training.loop.callbacks import CheckInputs
from training.loop.model_io import load_for_training, write_trained
from training.loop.objective import PreferenceObjective
from training.loop.policy_callbacks import CheckStart, EvaluateHeldOut, ReferenceChecker
from training.loop.policy_data import PolicyData, read_data
from training.loop.run_state import RunState
from training.loop.train_step import TrainStep
from training.loop.trainer import Trainer
from training.model.backbone import check_positions, text_config
from training.model.expert_routing import ExpertBalance
from training.parallel.model_specs import InferenceModelSpec, TrainModelSpec
from training.parallel.strategy import load_frozen
from training.parallel.train_state import TrainableParams

_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
_NO_SUCH_CHAMPION = "set `training.start_from: reference` until there is a champion with this tokenizer"


@dataclass(frozen=True)
class PolicyRun:
    """A run that is ready for its first step. `start` is the model that becomes the policy."""

    data: PolicyData
    start: Input
    params: TrainableParams
    state: RunState
    trainer: Trainer


def run(job: Job, group: Group, events: EventWriter) -> JobResult:
    """Train the policy and write it into `job.staging`. Raise TrainingError if the run must not go on."""
    prepared = prepare(job, group, events)
    prepared.trainer.run()
    events.phase("saving the policy")
    return save_policy(job, group, prepared)


def prepare(job: Job, group: Group, events: EventWriter) -> PolicyRun:
    """Read, check and load all that the run needs."""
    events.phase("reading pairs and reference log-probs")
    state = RunState(job, group, events, ("loss", *_REWARDS))
    data = read_data(job, group, events)
    start = find_start(job, data)
    checker = ReferenceChecker(data, group, events, state)
    if state.resumed_step is None and not data.starts_as_reference:
        check_reference_alone(job, data, group, events, checker)
    params = load_policy(job, data, start, group, events, state)
    callbacks = [CheckInputs(), CheckStart(checker, params), EvaluateHeldOut(checker, params)]
    coefficient = data.settings.router_aux_loss_coef
    balance = ExpertBalance(coefficient, group) if coefficient else None
    objective = PreferenceObjective(data.pairs, data.table, data.settings.loss, group, balance)
    train_step = TrainStep(params, objective, data.batches, data.settings, data.steps)
    return PolicyRun(data, start, params, state, Trainer(job, events, train_step, state, callbacks))


def find_start(job: Job, data: PolicyData) -> Input:
    """Return the model that becomes the policy. Raise TrainingError if the champion has another tokenizer."""
    if data.settings.champion is None:
        return job.inputs["reference_model"]
    folder = Path(job.locations["champion"])
    if holds_tokenizer(folder):  # another program may have registered the model without one
        tokenizer = load_tokenizer(job.inputs["tokenized_pairs"].folder / TOKENIZER_FOLDER)
        if foreign := foreign_tokens(tokenizer, load_tokenizer(folder)):
            raise TrainingError(
                f"the champion in {folder} was trained with another tokenizer: {len(foreign):,} of the {len(tokenizer):,} "
                f"tokens of the pairs have another number there or none, first {foreign[0]!r}; {_NO_SUCH_CHAMPION}",
                "champion-tokenizer",
            )
    return Input(kind="champion", fingerprint=data.settings.champion, folder=folder)


def check_reference_alone(
    job: Job, data: PolicyData, group: Group, events: EventWriter, checker: ReferenceChecker
) -> None:
    """Check the table against the reference model, and free that. Raise TrainingError."""
    events.phase("loading the reference model for its check")
    frozen = InferenceModelSpec(job.inputs["reference_model"], data.table.dtype)
    with checker.state.timed("proof"):
        model = load_frozen(frozen, job.compute.parallel, group, events)
    checker.check(model)
    del model
    gc.collect()  # its parts form cycles, and the policy needs the memory


def load_policy(
    job: Job, data: PolicyData, start: Input, group: Group, events: EventWriter, state: RunState
) -> TrainableParams:
    """Load the model that becomes the policy. Raise TrainingError if a champion lacks tokens of the pairs."""
    events.phase("loading the model that becomes the policy")
    settings = data.settings
    spec = TrainModelSpec(
        start.folder,
        settings.precision,
        settings.adapter,
        settings.seed,
        settings.disable_dropout,
        float8_head=settings.head_precision == "float8",
    )
    with state.timed("loading"):
        routing = "training" if settings.router_aux_loss_coef else None
        params = load_for_training(spec, job.compute, group, events, routing)
    if settings.champion is not None:
        # Without a tokenizer in the champion's folder, only its size can tell.
        vocabulary = text_config(params.model).vocab_size
        if (largest := data.pairs.largest_token) >= vocabulary:
            raise TrainingError(
                f"the pairs have token ids up to {largest:,}, and the champion in {start.folder} has {vocabulary:,} tokens: it "
                f"was trained with another tokenizer; {_NO_SUCH_CHAMPION}",
                "champion-tokenizer",
            )
        check_positions(params.model, data.pairs.longest, events)
    return params


def save_policy(job: Job, group: Group, done: PolicyRun) -> JobResult:
    """Write the policy's folder. Only rank 0 writes and knows the fingerprint."""
    with done.state.timed("saving"):
        fingerprint = write_trained(job, done.params, done.start, done.data.settings.adapter)
    if not group.is_main:
        return JobResult(fingerprint)
    facts = done.state.facts
    rewards = [value for name in _REWARDS for value in facts["series"][name]]
    counts = {"train": len(done.data.batches.items), "validation": len(done.data.held_out)}
    summary = {**facts, "pairs": counts, "rewards_finite": all(map(math.isfinite, rewards)), "world": group.world}
    write_json(job.staging / "training.json", job.settings)
    write_json(job.staging / "recipe.json", job.recipe)
    write_json(job.staging / "metrics.json", summary)
    if job.events.is_file():
        shutil.copyfile(job.events, job.staging / "events.jsonl")
    return JobResult(fingerprint, summary)
