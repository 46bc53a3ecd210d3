"""The file that describes a job: whoever reads it finds a whole one."""

import os

from training.contract.job import Job
from training.contract.recipe import Compute


def test_a_job_that_is_written_again_replaces_its_file_in_one_step(tmp_path):
    """Written in place, the bytes under the second name of the file would have changed as well."""
    job = Job(
        kind="policy", artifact="policy", code_version="1", inputs={}, settings={"seed": 0}, locations={},
        compute=Compute(), recipe={}, store=tmp_path / "store", folder=tmp_path / "jobs" / "one",
    )  # fmt: skip
    os.link(job.write(), tmp_path / "before.json")
    later = job.model_copy(update={"settings": {"seed": 1}})
    later.write()
    assert (Job.read(tmp_path / "before.json"), Job.read(job.path)) == (job, later)
    assert [path.name for path in job.folder.iterdir()] == ["job.json"]
