"""The entry point with real work of the data kinds: what it publishes, and what it writes when that fails."""

import errno
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from tests.training.runs import settings
from tests.training.workshop import Workshop, locations_of
from tests.training.worlds import TinyWorld
from training.contract.errors import TrainingError
from training.contract.protocol.events import read_events
from training.contract.protocol.job import SUPERVISOR, Failure, Job, JobKind
from training.contract.store.store import Store
from training.main import WORK, _explained, main

PAIR = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "chosen": [{"role": "assistant", "content": "4"}],
    "rejected": [{"role": "assistant", "content": "5"}],
}
MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    def make(validation_fraction: float | str = 0.1) -> Job:
        source = tmp_path / "pairs.jsonl"
        source.write_text(json.dumps(PAIR) + "\n")
        settings = {"formats": ["auto"], "held_out": [False], "duplicates": "keep"}
        settings |= {"validation_fraction": validation_fraction}
        where = locations_of([{"path": str(source)}])
        workshop = Workshop(tmp_path)
        return workshop.job("preferences", "raw_preferences", workshop.source(), settings, where)

    return make


def failure(job: Job) -> Failure:
    assert main(job.path) == 1
    return Failure.model_validate_json(job.error.read_bytes())


def test_every_kind_of_job_has_its_work() -> None:
    assert set(WORK) == set(get_args(JobKind))
    assert all(callable(importlib.import_module(module).run) for module in WORK.values())


def test_training_does_not_import_what_reads_data(tiny_world: TinyWorld) -> None:
    """The libraries that read data are 90 MB in every rank; a line that imports them is another job's own."""
    job = tiny_world.job("policy", settings(max_steps=1))
    code = "import sys; from pathlib import Path; from training.main import main; print(main(Path(sys.argv[1])), "
    code += "[m for m in ('datasets', 'pandas') if m in sys.modules])"
    command = [sys.executable, "-c", code, str(job.path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0 []\n"


def test_reading_data_does_not_import_the_compiler(make_job: MakeJob) -> None:
    """torch's is more than a thousand modules, with sympy. Making algorithms deterministic imports it."""
    code = f"import sys; from pathlib import Path; from training.main import main; main(Path({str(make_job().path)!r}))"
    code += "; print([m for m in ('torch._dynamo', 'sympy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_what_the_work_made_is_published(make_job: MakeJob) -> None:
    """Nothing that an earlier attempt left in the staging folder gets into the artifact, and nothing stays behind."""
    job = make_job()
    job.staging.mkdir(parents=True)
    (job.staging / "left-by-a-killed-attempt").touch()
    assert main(job.path) == 0
    artifact = Store(job.store).find("raw_preferences", job.derivation.key)
    assert artifact is not None
    assert set(artifact.manifest.files) == {"preferences.parquet", "quarantine.parquet"}
    assert {"event": "phase", "phase": "reading preferences"}.items() <= next(read_events(job.events)).items()
    assert not job.staging.exists()


def test_checkpoints_go_once_their_artifact_is_published(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    (job.checkpoints / "step-00000001").mkdir(parents=True)
    data = (tmp_path / "pairs.jsonl").read_text()
    (tmp_path / "pairs.jsonl").unlink()
    assert main(job.path) == 1 and job.checkpoints.exists()
    (tmp_path / "pairs.jsonl").write_text(data)
    assert main(job.path) == 0 and not job.checkpoints.exists()


def test_the_same_contents_again_leave_no_staging_folder(make_job: MakeJob) -> None:
    """Other settings, the same outcome: a validation fraction of 0.1 or 0.1000001 puts this one pair on one side."""
    first, second = make_job(0.1), make_job(0.1000001)
    for job in (first, second):
        assert main(job.write()) == 0
    assert not second.staging.exists()
    found = [Store(job.store).find("raw_preferences", job.derivation.key, hashes=False) for job in (first, second)]
    assert found[0] is not None and found[1] is not None
    assert found[0].folder == found[1].folder


def test_what_a_person_can_act_on_is_told_without_a_traceback(
    make_job: MakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job()
    (tmp_path / "pairs.jsonl").unlink()
    said = failure(job)
    assert (said.type, said.rank, said.traceback) == ("DataError", 0, "")
    assert str(tmp_path / "pairs.jsonl") in said.message
    assert capsys.readouterr().err == f"DataError: {said.message}\n"


def test_a_programmers_mistake_is_told_with_its_traceback(make_job: MakeJob) -> None:
    said = failure(make_job(validation_fraction="a tenth"))
    assert said.traceback.startswith("Traceback (most recent call last)")
    assert said.traceback.rstrip().endswith(f"{said.type}: {said.message}")


def test_memory_that_numpy_lacks_is_told_with_advice(make_job: MakeJob) -> None:
    """A petabyte, which no machine has: its error is of another kind than torch's."""
    with pytest.raises(MemoryError) as lacking:
        np.zeros(1 << 50, np.uint8)
    told = _explained(make_job(), lacking.value)
    assert isinstance(told, TrainingError)
    assert "raw_preferences: Unable to allocate 1.00 PiB" in str(told) and "more memory" in str(told)


def test_the_first_account_of_a_failure_stays(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    job.error.write_text("what another rank said before")
    (tmp_path / "pairs.jsonl").unlink()
    assert main(job.path) == 1
    assert job.error.read_text() == "what another rank said before"


def test_a_process_whose_supervisor_is_gone_does_nothing(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setenv(SUPERVISOR, str(gone.pid))
    job = make_job()
    with pytest.raises(SystemExit, match=f"process {gone.pid}"):
        main(job.path)
    assert not job.events.exists()


def test_a_full_disk_is_told_with_what_to_do_and_without_a_traceback(make_job: MakeJob) -> None:
    """/dev/full takes nothing, as a disk without a free byte."""
    job = make_job()
    job.events.parent.mkdir(parents=True, exist_ok=True)
    job.events.symlink_to("/dev/full")
    said = failure(job)
    assert (said.type, said.traceback) == ("StoreError", "")
    assert "bytes free" in said.message and "No space left on device; make room and run again" in said.message


def test_a_quota_or_another_full_place_is_told_in_its_own_words(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free bytes of the store alone would puzzle whoever reads of a full disk."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/elsewhere/part")

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter", refuse)
    said = failure(make_job())
    assert said.type == "StoreError"
    assert said.message.endswith(
        "bytes free): OSError: [Errno 122] Disk quota exceeded: '/elsewhere/part'; make room and run again: what was "
        "finished is kept"
    )
