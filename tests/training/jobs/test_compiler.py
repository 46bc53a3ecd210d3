"""Jobs of recipes with `compute.compile`, as processes of their own, where torch's compiler lacks something."""

import os
import subprocess
import sys

import pytest

from tests.training.runs import settings
from tests.training.workshop import Workshop
from training.contract.protocol.job import Failure, Job

NO_HEADERS = """#!/bin/sh
case "$*" in --version|-v) exec g++ "$@";; esac
echo "main.cpp:47:10: fatal error: Python.h: No such file or directory" >&2; exit 1
"""


@pytest.fixture
def training(tiny_world) -> Job:
    return tiny_world.job("policy", settings(), compile=True)


@pytest.fixture
def scoring(tiny_world, tmp_path) -> Job:
    inputs = {"tokenized_pairs": tiny_world.pairs, "reference_model": tiny_world.model}
    job = Workshop(tmp_path / "workshop").job("reference", "reference_logprobs", inputs, {"dtype": "float32"})
    job = job.model_copy(update={"recipe": {"compute": {"compile": True}}})
    job.write()
    return job


@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "compiler", "told"),
    [
        ("training", None, "No working C++ compiler found"),
        # which may take hours, before a training that then fails
        ("scoring", NO_HEADERS, "fatal error: Python.h: No such file or directory"),
    ],
    ids=["training", "scoring"],
)
def test_what_compiling_lacks_is_told_with_what_to_do(request, tmp_path, kind, compiler, told):
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
    assert failure.message.startswith("`compute.compile`: torch cannot compile on this machine: ")
    assert told in failure.message
    assert "(on Debian: apt-get install -y g++ python3-dev), or set it to false" in failure.message
    assert "Traceback" in done.stderr, "the log has what the compiler said"
    assert not (job.store / "memo").exists()
