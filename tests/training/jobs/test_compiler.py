"""Jobs with `compute.compile` in their own processes, on a machine without a working compiler."""

import os
import subprocess
import sys

import pytest

from tests import factories
from tests.training.job_runner import JobRunner
from tests.training.runs import settings
from training.contract.protocol.job import Failure, Job

NO_HEADERS = """#!/bin/sh
case "$*" in --version|-v) exec g++ "$@";; esac
echo "main.cpp:47:10: fatal error: Python.h: No such file or directory" >&2; exit 1
"""


@pytest.fixture
def training(tiny_inputs) -> Job:
    return tiny_inputs.job("policy", settings(), compile=True)


@pytest.fixture
def scoring(tiny_inputs, tmp_path) -> Job:
    inputs = {"tokenized_pairs": tiny_inputs.pairs, "reference_model": tiny_inputs.model}
    job = JobRunner(tmp_path / "workshop").job("reference", "reference_logprobs", inputs, {"dtype": "float32"})
    job = job.model_copy(update={"recipe": factories.recipe(compute={"compile": True})})
    job.write()
    return job


@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "compiler", "cause"),
    [
        ("training", None, "No working C++ compiler found"),
        # scoring may take hours before a training that then fails
        ("scoring", NO_HEADERS, "fatal error: Python.h: No such file or directory"),
    ],
    ids=["training", "scoring"],
)
def test_job_without_working_compiler_writes_cause_and_advice(request, tmp_path, kind, compiler, cause):
    if compiler is not None:
        (tmp_path / "g++").write_text(compiler)
        (tmp_path / "g++").chmod(0o755)
    job: Job = request.getfixturevalue(kind)
    environment = {**os.environ, "CXX": str(tmp_path / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    command = [sys.executable, "-m", "training.main", str(job.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    failure = Failure.model_validate_json(job.error.read_bytes())
    assert failure.type == "TrainingError"
    assert failure.message.startswith("`compute.compile`: ")
    assert cause in failure.message and "apt-get install -y g++ python3-dev" in failure.message
    assert "Traceback" in done.stderr, "the log has the output of the compiler"
    assert not (job.store / "memo").exists()
