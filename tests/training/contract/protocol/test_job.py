"""The file that describes a job: whoever reads it finds a whole one, and by its kind what the job is given."""

import os
from pathlib import Path
from typing import get_args

from training.contract.config.recipe import Compute
from training.contract.protocol.job import Job, JobKind


def job_in(folder: Path, kind: JobKind, compute: Compute) -> Job:
    return Job(
        kind=kind, artifact="policy", code_version="1", inputs={}, settings={"seed": 0}, locations={},
        compute=compute, recipe={}, store=folder / "store", folder=folder / "jobs" / "one",
    )  # fmt: skip


def test_a_job_that_is_written_again_replaces_its_file_in_one_step(tmp_path: Path):
    """Written in place, the bytes under the second name of the file would have changed as well."""
    job = job_in(tmp_path, "policy", Compute())
    os.link(job.write(), tmp_path / "before.json")
    later = job.model_copy(update={"settings": {"seed": 1}})
    later.write()
    assert (Job.read(tmp_path / "before.json"), Job.read(job.path)) == (job, later)
    assert [path.name for path in job.folder.iterdir()] == ["job.json"]


def test_work_with_models_is_shared_among_all_processes_and_work_on_data_is_not(tmp_path: Path):
    """And a model in training has time to be saved when its job is stopped, which no other work needs."""
    compute = Compute(nodes=2, processes_per_node=4, grace_seconds=17)
    alone = dict.fromkeys(("preferences", "tokenizer", "release_files", "pairs", "merge"), (1, 1, 1))
    scoring = dict.fromkeys(("reference", "evaluation", "proof"), (2, 4, 1))
    tuning = dict.fromkeys(("sft", "policy"), (2, 4, 17))
    jobs = {kind: job_in(tmp_path, kind, compute) for kind in get_args(JobKind)}
    found = {kind: (job.nodes, job.processes, job.grace_seconds) for kind, job in jobs.items()}
    assert found == alone | scoring | tuning
