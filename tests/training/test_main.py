"""The entry point with real data jobs: the published artifact, and the error that a failure writes."""

import errno
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tests.training.job_runner import JobRunner, locations_of
from tests.training.runs import settings
from tests.training.tiny_inputs import TinyInputs
from training.contract.errors import TrainingError
from training.contract.protocol.events import read_events
from training.contract.protocol.job import SUPERVISOR, Failure, Job, JobKind
from training.contract.store.store import Store
from training.main import WORK, _explain, main

pytestmark = pytest.mark.slow

PAIR = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "chosen": [{"role": "assistant", "content": "4"}],
    "rejected": [{"role": "assistant", "content": "5"}],
}
MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    def make(validation_fraction: float = 0.1, held_out: Sequence[bool] = (False,)) -> Job:
        source = tmp_path / "pairs.jsonl"
        source.write_text(json.dumps(PAIR) + "\n")
        settings: dict[str, Any] = {"formats": ["auto"], "held_out": held_out, "duplicates": "keep"}
        settings |= {"validation_fraction": validation_fraction}
        where = locations_of([{"path": str(source)}])
        job_runner = JobRunner(tmp_path)
        return job_runner.job("preferences", "raw_preferences", job_runner.source(), settings, where)

    return make


def failure(job: Job) -> Failure:
    assert main(job.path) == 1
    return Failure.model_validate_json(job.error.read_bytes())


def test_every_job_kind_has_a_module_with_run() -> None:
    assert set(WORK) == set(get_args(JobKind))
    assert all(callable(importlib.import_module(module).run) for module in WORK.values())


def test_policy_job_does_not_import_data_libraries(tiny_inputs: TinyInputs) -> None:
    """These libraries need 90 MB in every rank."""
    job = tiny_inputs.job("policy", settings(max_steps=1))
    code = "import sys; from pathlib import Path; from training.main import main; print(main(Path(sys.argv[1])), "
    code += "[m for m in ('datasets', 'pandas') if m in sys.modules])"
    command = [sys.executable, "-c", code, str(job.path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0 []\n"


def test_preferences_job_does_not_import_the_compiler(make_job: MakeJob) -> None:
    """torch's compiler has more than a thousand modules, with sympy. Deterministic algorithms import it."""
    code = f"import sys; from pathlib import Path; from training.main import main; main(Path({str(make_job().path)!r}))"
    code += "; print([m for m in ('torch._dynamo', 'sympy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_main_publishes_only_files_of_this_attempt(make_job: MakeJob) -> None:
    """A file of an earlier attempt in the staging folder is not published. The staging folder is removed."""
    job = make_job()
    job.staging.mkdir(parents=True)
    (job.staging / "left-by-a-killed-attempt").touch()
    assert main(job.path) == 0
    artifact = Store(job.store).find("raw_preferences", job.derivation.key)
    assert artifact is not None
    assert set(artifact.manifest.files) == {"preferences.parquet", "quarantine.parquet"}
    assert {"event": "phase", "phase": "reading preferences"}.items() <= next(read_events(job.events)).items()
    assert not job.staging.exists()


def test_main_removes_checkpoints_after_publishing_only(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    (job.checkpoints / "step-00000001").mkdir(parents=True)
    data = (tmp_path / "pairs.jsonl").read_text()
    (tmp_path / "pairs.jsonl").unlink()
    assert main(job.path) == 1 and job.checkpoints.exists()
    (tmp_path / "pairs.jsonl").write_text(data)
    assert main(job.path) == 0 and not job.checkpoints.exists()


def test_main_with_contents_published_before_removes_staging(make_job: MakeJob) -> None:
    """Two derivations with the same contents: validation fractions of 0.1 and 0.1000001 give this pair the same split."""
    first, second = make_job(0.1), make_job(0.1000001)
    for job in (first, second):
        assert main(job.write()) == 0
    assert not second.staging.exists()
    found = [Store(job.store).find("raw_preferences", job.derivation.key, hashes=False) for job in (first, second)]
    assert found[0] is not None and found[1] is not None
    assert found[0].folder == found[1].folder


def test_main_with_user_error_writes_no_traceback(
    make_job: MakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job()
    (tmp_path / "pairs.jsonl").unlink()
    error = failure(job)
    assert (error.type, error.rank, error.traceback) == ("DataError", 0, "")
    assert str(tmp_path / "pairs.jsonl") in error.message
    assert capsys.readouterr().err == f"DataError: {error.message}\n"


def test_main_with_programming_error_writes_its_traceback(make_job: MakeJob) -> None:
    error = failure(make_job(held_out=()))
    assert error.traceback.startswith("Traceback (most recent call last)")
    assert error.traceback.rstrip().endswith(f"{error.type}: {error.message}")


def test_explain_memory_error_of_numpy_gives_advice(make_job: MakeJob) -> None:
    """No machine has a petabyte. numpy's error has another class than torch's."""
    with pytest.raises(MemoryError) as lacking:
        np.zeros(1 << 50, np.uint8)
    error = _explain(make_job(), lacking.value)
    assert isinstance(error, TrainingError) and error.code == "out-of-memory"
    assert "raw_preferences: Unable to allocate 1.00 PiB" in str(error) and "more memory" in str(error)


def test_main_keeps_error_file_of_another_rank(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    job.error.write_text("error of another rank")
    (tmp_path / "pairs.jsonl").unlink()
    assert main(job.path) == 1
    assert job.error.read_text() == "error of another rank"


def test_main_without_its_supervisor_exits_at_once(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setenv(SUPERVISOR, str(ended.pid))
    job = make_job()
    with pytest.raises(SystemExit, match=f"process {ended.pid}"):
        main(job.path)
    assert not job.events.exists()


def test_main_on_full_disk_writes_free_bytes_and_no_traceback(make_job: MakeJob) -> None:
    """/dev/full refuses every write, like a full disk."""
    job = make_job()
    job.events.parent.mkdir(parents=True, exist_ok=True)
    job.events.symlink_to("/dev/full")
    error = failure(job)
    assert (error.type, error.traceback) == ("StoreError", "")
    assert "bytes free" in error.message and "No space left on device" in error.message


def test_main_on_exceeded_quota_writes_the_error_of_the_system(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free bytes of the store alone would not explain a quota or another full disk."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/elsewhere/part")

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter", refuse)
    error = failure(make_job())
    assert error.type == "StoreError"
    assert "OSError: [Errno 122] Disk quota exceeded: '/elsewhere/part'" in error.message
