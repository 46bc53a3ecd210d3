"""A base model is rewritten during `pedigree run`: no wrong champion, and no wrong result is kept for later runs."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.training.rewriting import other_weights, phase, write_in_place
from tests.workflows.homes import Home
from training.contract.identity.file_stamps import model_stamps, settled
from training.contract.protocol.events import Event, Follower
from training.contract.protocol.job import Job
from workflows.commands.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.system]
WEIGHTS = "model.safetensors"


@pytest.fixture
def recipe(small_recipe: Path, tmp_path: Path) -> Path:
    """Return a recipe with a base of its own, which may be rewritten."""
    return Path(shutil.copytree(small_recipe, tmp_path / "small"))


@pytest.fixture
def unscored(first_run, tmp_path: Path) -> Home:
    """Return the home after the run, without log-probs, policy and everything below."""
    home = Home(tmp_path / "home")
    shutil.copytree(first_run[0].path, home.path)
    for asset in ("reference_logprobs", "policy", "evaluation"):
        shutil.rmtree(home.path / "store" / asset)
        shutil.rmtree(home.path / "store" / "keys" / asset)
    shutil.rmtree(home.path / "store" / "memo")
    shutil.rmtree(home.path / "jobs")
    return home


def fingerprint(report, asset: str) -> str:
    return next(each["fingerprint"] for each in report["assets"] if each["asset"] == asset)


@contextmanager
def rewritten(home: Home, asset: str, when: Callable[[Event], bool], file: Path, content: bytes):
    """Within the block, rewrite `file` when the job of `asset` reaches a point. Yield an event that is set then."""
    done, is_over = threading.Event(), threading.Event()

    def follow() -> None:
        followers: dict[Path, Follower] = {}
        while not is_over.is_set() and not done.is_set():
            for events in (home.path / "jobs").glob(f"{asset}-*/events.jsonl"):
                if any(map(when, followers.setdefault(events, Follower(events)).new())):
                    write_in_place(file, content)
                    done.set()
            time.sleep(0.002)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        is_over.set()
        thread.join()


def test_job_receives_hashes_of_settled_files(checkout, materialized):
    """A scoring job of `verify` reads the table, the pairs, and the base that the reference model points at."""
    base = checkout.folder / "base"
    while settled(model_stamps(base)) != model_stamps(base):
        time.sleep(0.1)
    assert verify(checkout.pipeline, checkout.services, checkout.instance, rows=1).ok
    [file] = (checkout.home / "jobs").glob("proof-*/job.json")
    job = Job.read(file)
    assert job.stamps is not None
    assert job.stamps["reference_model"] == model_stamps(base)
    assert WEIGHTS in job.stamps["reference_model"] and "config.json" in job.stamps["reference_model"]
    assert {"pairs.arrow", "manifest.json", "tokenizer/tokenizer.json"} <= job.stamps["tokenized_pairs"].keys()
    assert "logprobs.safetensors" in job.stamps["reference_logprobs"]


def test_job_receives_no_hash_of_a_file_changed_just_now(checkout):
    """The job hashes such a file again: a stamp hides a second change within a tick of the clock."""
    (checkout.folder / "base" / WEIGHTS).touch()
    assert verify(checkout.pipeline, checkout.services, checkout.instance, rows=1).ok
    [file] = (checkout.home / "jobs").glob("proof-*/job.json")
    stamps = Job.read(file).stamps
    assert stamps is not None and WEIGHTS not in stamps["reference_model"]


def test_the_same_bytes_written_in_mid_training_change_no_champion(unscored: Home, recipe: Path, first_run):
    file = recipe / "base" / WEIGHTS
    with rewritten(unscored, "policy", phase("training"), file, file.read_bytes()) as done:
        report = unscored.run(str(recipe))
    assert done.is_set()
    for asset in ("reference_logprobs", "policy", "evaluation"):
        assert fingerprint(report, asset) == fingerprint(first_run[1], asset)


@pytest.mark.parametrize("when", ["look up", "loading the reference model", "score sequences"])
def test_other_weights_in_the_reference_pass_leave_nothing_behind(unscored: Home, recipe: Path, first_run, when: str):
    file = recipe / "base" / WEIGHTS
    right = file.read_bytes()
    with rewritten(unscored, "reference_logprobs", phase(when), file, other_weights(file)) as done:
        failed = unscored.pedigree("run", str(recipe), "--json")
    assert done.is_set() and failed.returncode == 1
    [error] = {asset["error"] for asset in json.loads(failed.stdout)["assets"] if asset["error"]}
    assert str(recipe / "base") in error
    write_in_place(file, right)
    report = unscored.run(str(recipe))
    for asset in ("reference_logprobs", "policy", "evaluation"):
        assert fingerprint(report, asset) == fingerprint(first_run[1], asset)
