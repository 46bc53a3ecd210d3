"""The check of a node before it runs a job: the same files and the same software as the machine that submitted the job."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workflows.homes import check_error
from training.contract.errors import EngineError
from training.contract.protocol.job import Input, Job
from training.launch.cluster.network import interface_of, own_address
from training.launch.cluster.task import check_job, software_of, write_software
from training.launch.engine import digest_of
from training.launch.launcher import write_job

MakeJob = Callable[..., Job]


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    write_job(job := make_job("write"))
    write_software(job)
    return job


def refusal(job: Job, sha256: str) -> EngineError:
    with pytest.raises(EngineError) as caught:
        check_job(job.path, sha256)
    return caught.value


def test_check_job_on_the_machine_that_submitted_it_returns_the_job(job: Job) -> None:
    assert check_job(job.path, digest_of(job)) == job


def test_check_job_without_the_shared_folder_names_the_file(job: Job) -> None:
    digest = digest_of(job)
    job.path.unlink()
    check_error(refusal(job, digest), "not-shared", job.path, "No such file", "PEDIGREE_HOME")


def test_check_job_of_another_submission_is_refused(job: Job) -> None:
    check_error(refusal(job, "0" * 64), "not-shared", job.path, "not the submitted one")


def test_check_job_without_an_input_names_its_folder(make_job: MakeJob, tmp_path: Path) -> None:
    missing = Input(kind="base_model", fingerprint="f" * 64, folder=tmp_path / "models" / "base")
    write_job(job := make_job("write").model_copy(update={"inputs": {"base_model": missing}}))
    write_software(job)
    check_error(refusal(job, digest_of(job)), "not-shared", missing.folder, "base_model")


@pytest.mark.parametrize("name", ["torch", "the source of Pedigree"])
def test_check_job_with_other_software_names_both_versions(job: Job, name: str) -> None:
    versions = json.loads(software_of(job.path).read_text())
    software_of(job.path).write_text(json.dumps(versions | {name: "0.1"}))
    check_error(
        refusal(job, digest_of(job)), "other-software", f"{name} {versions[name]}, not 0.1", "`python` of engine.yaml"
    )


def test_interface_of_an_address_of_this_machine_is_found(job: Job) -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(EngineError, match=r"192\.0\.2\.77.*lo 127\.0\.0\.1"):
        interface_of("192.0.2.77")
