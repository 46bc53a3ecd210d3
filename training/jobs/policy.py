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

from training.contract.config.key_settings import key_settings
from training.contract.errors import TrainingError
from training.contract.identity.tokenizer_files import holds_tokenizer
from training.contract.protocol.artifacts import CHAMPION, AssetName
from training.contract.protocol.details import PolicyDetails
from training.contract.protocol.job import Input, Job
from training.contract.protocol.locations import PolicyLocations
from training.contract.protocol.settings import TrainingSpec
from training.contract.protocol.spec_files import TOKENIZER_FOLDER
from training.contract.store.artifact import JobResult, write_json
from training.data.templates.tokenizer import foreign_tokens, load_tokenizer
from training.job_context import JobContext
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

Context = JobContext[TrainingSpec, PolicyLocations]

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


def run(context: Context) -> JobResult[PolicyDetails]:
    """Train the policy and write it into the staging folder. Raise TrainingError if the run must not go on."""
    prepared = prepare(context)
    prepared.trainer.run()
    context.events.phase("saving the policy")
    return save_policy(context, prepared)


def prepare(context: Context) -> PolicyRun:
    """Read, check and load all that the run needs."""
    group, events = context.group, context.events
    events.phase("reading pairs and reference log-probs")
    state = RunState(context, ("loss", *_REWARDS))
    data = read_data(context)
    start = find_start(context.job, data)
    checker = ReferenceChecker(data, group, events, state)
    if state.resumed_step is None and not data.starts_as_reference:
        check_reference_alone(context, data, checker)
    params = load_policy(context, data, start, state)
    callbacks = [CheckInputs(), CheckStart(checker, params), EvaluateHeldOut(checker, params)]
    coefficient = data.settings.router_aux_loss_coef
    balance = ExpertBalance(coefficient, group) if coefficient else None
    objective = PreferenceObjective(data.pairs, data.table, data.settings.loss, group, balance)
    train_step = TrainStep(params, objective, data.batches, data.settings, data.steps)
    return PolicyRun(data, start, params, state, Trainer(context, train_step, state, callbacks))


def find_start(job: Job[TrainingSpec, PolicyLocations], data: PolicyData) -> Input:
    """Return the model that becomes the policy. Raise TrainingError if the champion has another tokenizer."""
    if data.settings.champion is None:
        return job.inputs[AssetName.REFERENCE_MODEL]
    folder = job.locations.champion
    assert folder is not None, "a champion without a folder"
    if holds_tokenizer(folder):  # another program may have registered the model without one
        tokenizer = load_tokenizer(job.inputs[AssetName.TOKENIZED_PAIRS].folder / TOKENIZER_FOLDER)
        if foreign := foreign_tokens(tokenizer, load_tokenizer(folder)):
            raise TrainingError(
                f"the champion in {folder} was trained with another tokenizer: {len(foreign):,} of the {len(tokenizer):,} "
                f"tokens of the pairs have another number there or none, first {foreign[0]!r}; {_NO_SUCH_CHAMPION}",
                "champion-tokenizer",
            )
    return Input(kind=CHAMPION, fingerprint=data.settings.champion, folder=folder)


def check_reference_alone(context: Context, data: PolicyData, checker: ReferenceChecker) -> None:
    """Check the table against the reference model, and free that. Raise TrainingError."""
    context.events.phase("loading the reference model for its check")
    frozen = InferenceModelSpec(context.inputs[AssetName.REFERENCE_MODEL], data.table.dtype)
    with checker.state.timed("proof"):
        model = load_frozen(frozen, context.job.compute.parallel, context.group, context.events)
    checker.check(model)
    del model
    gc.collect()  # its parts form cycles, and the policy needs the memory


def load_policy(context: Context, data: PolicyData, start: Input, state: RunState) -> TrainableParams:
    """Load the model that becomes the policy. Raise TrainingError if a champion lacks tokens of the pairs."""
    events = context.events
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
        params = load_for_training(spec, context.job.compute, context.group, events, routing)
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


def save_policy(context: Context, done: PolicyRun) -> JobResult[PolicyDetails]:
    """Write the policy's folder. Only rank 0 writes and knows the fingerprint."""
    job, group = context.job, context.group
    with done.state.timed("saving"):
        fingerprint = write_trained(job, done.params, done.start, done.data.settings.adapter)
    if not group.is_main:
        return JobResult(fingerprint)
    figures = done.state.figures
    rewards = [value for name in _REWARDS for value in figures.series[name]]
    counts = {"train": len(done.data.batches.items), "validation": len(done.data.held_out)}
    summary = {
        **figures.to_json(),
        "pairs": counts,
        "rewards_finite": all(map(math.isfinite, rewards)),
        "world": group.world,
    }
    write_json(job.staging / "training.json", key_settings(job.settings))
    write_json(job.staging / "recipe.json", job.recipe.model_dump(mode="json"))
    write_json(job.staging / "metrics.json", summary)
    if job.events.is_file():
        shutil.copyfile(job.events, job.staging / "events.jsonl")
    return JobResult(fingerprint, PolicyDetails.model_validate(summary))
