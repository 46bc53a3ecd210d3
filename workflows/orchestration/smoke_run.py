"""A smoke run: a few training steps with the recipe's settings, to see that data, model, memory and engine fit together.

It trains on the pairs with the longest sequences, from the base model, so it needs as much memory as any step of the recipe.
Rows and tokens are made in the store as by any run. The policy is removed afterwards. Dagster records no materialization, and
MLflow no run and no version.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from logging import Logger

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from assets.bodies.reference import reference_pointer
from assets.execution.materialize import JobSpec, describe_job, make, publish_resolved, run_work
from assets.inputs.current import find_model, resolve_root
from assets.pipeline.graph import GRAPH, derive
from assets.pipeline.pipeline import Pipeline, Services
from assets.views.pair_reader import SIDES, read_pairs
from assets.views.sentences import counted
from training.contract.config.key_settings import Settings
from training.contract.identity.fingerprint import fingerprint
from training.contract.protocol.artifacts import BASE_MODEL, POLICY, REFERENCE_LOGPROBS, TRAINING_SPEC, AssetName
from training.contract.protocol.details import PairsDetails, PolicyDetails
from training.contract.protocol.locations import PolicyLocations
from training.contract.protocol.settings import TrainingSpec
from training.contract.protocol.spec_files import SPEC_FILE
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.removal import keys_by_fingerprint, remove_artifact
from training.contract.store.store import Store
from workflows.state.data_artifacts import make_data

DEFAULT_STEPS = 5
_HELD_OUT = 16


class LongestPairs(Settings):
    """The settings of the shortened pairs."""

    longest: int


@dataclass(frozen=True)
class SmokeResult:
    """The outcome of a smoke run. `seconds` is its training time; `peak_memory_mb` that of the largest rank.

    `recipe_steps`: the number of steps of the recipe.
    """

    steps: int
    seconds: float
    first_loss: float
    last_loss: float
    peak_memory_mb: float
    recipe_steps: int

    def __str__(self) -> str:
        estimate = self.seconds / self.steps * self.recipe_steps
        return (
            f"{counted(self.steps, 'step')} on the longest pairs took {self.seconds:.1f} s: loss {self.first_loss:.4f} to "
            f"{self.last_loss:.4f}, peak memory {self.peak_memory_mb:,.0f} MB. At this speed the {self.recipe_steps:,} steps "
            f"of the recipe take at most {_duration(estimate)}. Nothing was materialized or registered"
        )


def smoke_run(pipeline: Pipeline, services: Services, steps: int, log: Logger) -> SmokeResult:
    """Train `steps` steps and return their figures. Raises the errors of a run."""
    full = make_data(pipeline, services)
    shortened = _shortened(pipeline, steps)
    with _longest_pairs(services.store, full.pairs, steps * pipeline.recipe.training.batch_size) as pairs:
        policy = _train(shortened, services, pairs, log)
        details = policy.details
        _remove(services.store, policy)
    return SmokeResult(
        steps=details.steps,
        seconds=details.seconds["training"],
        first_loss=details.series["loss"][0],
        last_loss=details.series["loss"][-1],
        peak_memory_mb=details.peak_memory_mb,
        recipe_steps=pipeline.recipe.training.steps(full.pairs.details.counts.train),
    )


def _shortened(pipeline: Pipeline, steps: int) -> Pipeline:
    """Return the recipe with `steps` steps from the base model, without supervised tuning or a champion before them."""
    recipe = pipeline.recipe
    training = recipe.training.model_copy(update={"max_steps": steps, "start_from": "reference"})
    reference = recipe.reference.model_copy(update={"sft": None})
    return replace(pipeline, recipe=recipe.model_copy(update={"training": training, "reference": reference}))


def _train(pipeline: Pipeline, services: Services, pairs: Artifact, log: Logger) -> Artifact[PolicyDetails]:
    base_model = publish_resolved(services, BASE_MODEL, find_model(pipeline, services), log).artifact
    found = resolve_root(pipeline, services, AssetName.TRAINING_SPEC)
    spec = publish_resolved(services, TRAINING_SPEC, found, log).artifact
    inputs = {
        AssetName.TOKENIZED_PAIRS: pairs.fingerprint,
        AssetName.REFERENCE_MODEL: reference_pointer(services, base_model.fingerprint, log).artifact.fingerprint,
    }
    scoring = JobSpec("reference", GRAPH[AssetName.REFERENCE_LOGPROBS].reads(pipeline.recipe))
    table = make(pipeline, services, REFERENCE_LOGPROBS, scoring, inputs, log).artifact
    inputs |= {AssetName.REFERENCE_LOGPROBS: table.fingerprint, AssetName.TRAINING_SPEC: spec.fingerprint}
    work = JobSpec("policy", TrainingSpec.model_validate(spec.json(SPEC_FILE)), PolicyLocations())
    job = describe_job(pipeline, services, POLICY.name, work, inputs)
    with services.store.lock(POLICY.name, job.derivation.key) as lock:  # not looked up: the purpose is to run it
        policy = run_work(services, POLICY, job, work, lock, log)
    _remove(services.store, table)
    return policy


@contextlib.contextmanager
def _longest_pairs(store: Store, pairs: Artifact[PairsDetails], train: int) -> Iterator[Artifact]:
    """Yield an artifact with the `train` longest training pairs and a few held-out ones. Remove it afterwards."""
    table = _select_longest(read_pairs(pairs), train)
    how = derive(AssetName.TOKENIZED_PAIRS, {AssetName.TOKENIZED_PAIRS: pairs.fingerprint}, LongestPairs(longest=train))
    splits = {name: pc.sum(pc.equal(table["split"], name)).as_py() or 0 for name in ("train", "validation")}
    counts = pairs.details.counts.model_copy(update={**splits, "pairs": len(table)})
    details = pairs.details.model_copy(update={"counts": counts})
    with store.lock(how.kind, how.key), store.staging() as staging:
        with pa.OSFile(str(staging / "pairs.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        for file in pairs.folder.glob("tokenizer/*"):
            (staging / "tokenizer").mkdir(exist_ok=True)
            (staging / "tokenizer" / file.name).write_bytes(file.read_bytes())
        smoke = store.publish(staging, how, JobResult(fingerprint("smoke_pairs", [pairs.fingerprint, train]), details))
    try:
        yield smoke
    finally:
        _remove(store, smoke)


def _select_longest(table: pa.Table, train: int) -> pa.Table:
    """Return the longest training pairs and the longest held-out ones, in the order of the rows."""
    lengths = np.sum([pc.list_value_length(table[f"{side}_ids"]).to_numpy() for side in SIDES], axis=0)
    is_train = pc.equal(table["split"], "train").to_numpy()
    order = np.argsort(-lengths, kind="stable")
    longest = [order[is_train[order]][:train], order[~is_train[order]][:_HELD_OUT]]
    return table.take(np.sort(np.concatenate(longest)))


def _remove(store: Store, artifact: Artifact) -> None:
    """Remove an artifact of this run, unless another run uses it by now."""
    kind, used = artifact.manifest.kind, store.used(artifact.manifest.kind, artifact.fingerprint)
    keys = keys_by_fingerprint(store, kind).get(artifact.fingerprint, [])
    remove_artifact(store, kind, artifact.fingerprint, keys, used)


def _duration(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
