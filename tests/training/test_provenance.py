"""The provenance of an artifact: machine, source and libraries."""

import json
import platform

import torch

from tests import factories
from training import main
from training.contract.protocol.artifacts import POLICY
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.store.artifact_kind import Provenance
from training.contract.store.store import Store
from training.distributed import ALONE
from training.jobs import policy
from training.provenance import device_name, provenance


def test_provenance_has_versions_threads_and_device():
    record = provenance(ALONE)
    assert Provenance.model_validate_json(record.model_dump_json()) == record
    assert record.libraries["python"] == platform.python_version()
    assert record.libraries["torch"] == torch.__version__
    assert (record.world, record.threads) == (1, torch.get_num_threads())
    assert record.device == device_name(torch.device("cpu")) != ""


def test_published_policy_has_provenance_and_seconds_in_its_details(tiny_inputs):
    """The details of manifest and key have them. The fingerprint is made of the weights alone."""
    settings = {"max_steps": 2, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}}
    job: Job = tiny_inputs.job("policy", settings, checkpoint_every=1)
    main.make(job, ALONE)
    details = Store(job.store).find(POLICY, job.derivation.key).details
    assert details.provenance == provenance(ALONE)
    phases = {"loading", "proof", "training", "evaluation", "checkpoints", "saving"}
    assert phases <= set(details.seconds) and all(s > 0 for s in details.seconds.values())
    assert set(details.peaks_mb) == set(details.seconds)
    assert details.peaks_mb["saving"] >= details.peaks_mb["proof"] > 0


def test_resumed_run_adds_its_seconds(tiny_inputs):
    """The second attempt resumes after the last step: it loads the model again, and trains no step."""
    settings = {"max_steps": 2, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}}
    job: Job = tiny_inputs.job("policy", settings, checkpoint_every=2)
    policy.run(factories.context(job, events=EventWriter(job.events)))
    before = json.loads(next(job.checkpoints.rglob("step-00000002/manifest.json")).read_text())["details"]["seconds"]
    again = policy.run(factories.context(job, events=EventWriter(job.events, keep=True))).details.seconds
    assert again["loading"] > before["loading"] and again["training"] == before["training"]
