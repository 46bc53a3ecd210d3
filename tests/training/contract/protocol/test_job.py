"""The file `job.json`, and the processes of each kind of job."""

import os
from pathlib import Path
from typing import get_args

from tests import factories
from training.contract.config.recipe import Compute
from training.contract.protocol.job import Job, JobKind


def job_in(folder: Path, kind: JobKind, compute: Compute) -> Job:
    return factories.job(kind, folder, compute=compute)


def test_write_replaces_the_file_in_one_step(tmp_path: Path):
    """Writing in place would also change the hard link."""
    job = job_in(tmp_path, "policy", Compute())
    os.link(job.write(), tmp_path / "before.json")
    later = job.model_copy(update={"settings": job.settings.model_copy(update={"seed": 1})})
    later.write()
    assert (Job.read(tmp_path / "before.json"), Job.read(job.path)) == (job, later)
    assert [path.name for path in job.folder.iterdir()] == ["job.json"]


def test_jobs_with_models_have_all_processes_and_training_has_grace_seconds(tmp_path: Path):
    """Jobs on data run in one process. Only training needs time to save a checkpoint when it is stopped."""
    compute = Compute(nodes=2, processes_per_node=4, grace_seconds=17)
    alone = dict.fromkeys(("preferences", "tokenizer", "release_files", "pairs", "merge"), (1, 1, 1))
    scoring = dict.fromkeys(("reference", "prequential", "evaluation", "proof"), (2, 4, 1))
    tuning = dict.fromkeys(("sft", "policy"), (2, 4, 17))
    jobs = {kind: job_in(tmp_path, kind, compute) for kind in get_args(JobKind)}
    found = {kind: (job.nodes, job.processes, job.grace_seconds) for kind, job in jobs.items()}
    assert found == alone | scoring | tuning
