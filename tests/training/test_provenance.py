"""What a job tells of the machine, the source and the libraries it ran with."""

import json
import platform

import torch

from training import main
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.distributed import ALONE
from training.jobs import policy
from training.provenance import device_name, provenance


def test_what_is_told():
    told = provenance(ALONE)
    assert json.loads(json.dumps(told)) == told
    assert told["libraries"]["python"] == platform.python_version()
    assert told["libraries"]["torch"] == torch.__version__
    assert (told["world"], told["threads"]) == (1, torch.get_num_threads())
    assert told["device"] == device_name(torch.device("cpu")) != ""


def test_a_published_policy_tells_it_with_the_seconds_of_each_phase(tiny_world):
    """In the details of its manifest and of its key; not in its identity, which is that of the weights alone."""
    settings = {"max_steps": 2, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}}
    job: Job = tiny_world.job("policy", settings, checkpoint_every=1)
    main.make(job, ALONE)
    details = Store(job.store).find(job.artifact, job.derivation.key).details
    assert details["provenance"] == provenance(ALONE)
    phases = {"loading", "proof", "training", "evaluation", "checkpoints", "saving"}
    assert phases <= set(details["seconds"]) and all(s > 0 for s in details["seconds"].values())
    assert set(details["peaks_mb"]) == set(details["seconds"])
    assert details["peaks_mb"]["saving"] >= details["peaks_mb"]["proof"] > 0


def test_a_run_that_is_taken_up_again_adds_its_seconds_to_those_before(tiny_world):
    """A second attempt resumes after the last step: it loads once more, and trains no step."""
    settings = {"max_steps": 2, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}}
    job: Job = tiny_world.job("policy", settings, checkpoint_every=2)
    policy.run(job, ALONE, EventWriter(job.events))
    before = json.loads(next(job.checkpoints.rglob("step-00000002/manifest.json")).read_text())["details"]["seconds"]
    again = policy.run(job, ALONE, EventWriter(job.events, keep=True)).details["seconds"]
    assert again["loading"] > before["loading"] and again["training"] == before["training"]
