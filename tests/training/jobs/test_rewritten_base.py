"""A base model is rewritten in place while a job reads it: the job gives the right artifact, or an error with the file.

The right artifact is the one of an undisturbed run. The ranks are real processes: forks in the quick tests, else torchrun.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import Forker
from tests.training.rewriting import Hand, Place, made, other_weights, phase, step, write_in_place
from tests.training.tiny_inputs import build_tiny_inputs
from training.contract.errors import JobFailed
from training.contract.protocol.events import Event, read_events
from training.contract.protocol.job import Failure, Job, JobKind
from training.contract.store.artifact import Artifact
from training.launch.launcher import run_job
from training.launch.local import LocalEngine

Moment = Callable[[Event], bool]
Run = Callable[[Job], str]  # returns the error of the job, or ""
Places = dict[str, Place]

MERGED = {"adapter": {"type": "lora", "rank": 2}}
EXPORTED = {"adapter": {"type": "lora", "rank": 2, "export": "adapter"}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("rewritten")
    return Place.of(build_tiny_inputs(root / "world"), root / "place")


def by_fork(forker: Forker) -> Run:
    def run(job: Job) -> str:
        job.error.unlink(missing_ok=True)
        statuses = forker.run(job, job.processes)
        return "" if set(statuses) == {0} else Failure.model_validate_json(job.error.read_bytes()).message

    return run


def by_launcher(job: Job) -> str:
    """Run the job like `pedigree run`. Return its error, or ""."""
    try:
        run_job(LocalEngine(), job, lambda event: None)
    except JobFailed as error:
        return str(error)
    return ""


def undisturbed(
    place: Place, root: Path, run: Run, kind: JobKind, changes: dict[str, Any] | None = None
) -> Artifact[Any]:
    job = place.copied_to(root).job(kind, changes)
    assert run(job) == ""
    return published(job)


def published(job: Job) -> Artifact[Any]:
    found = made(job)
    assert found is not None
    return found


def disturbed(
    place: Place, run: Run, kind: JobKind, moment: Moment | None, other: bool, changes: dict[str, Any] | None = None
) -> tuple[str, Artifact[Any]]:
    """Run a job and rewrite its base at `moment`. Return the job's error, or "", and its artifact.

    If the job fails, a second run makes the artifact. Without a moment, the base is rewritten before the job starts. Changed
    weights (`other`) stay until the job has ended.
    """
    job, right = place.job(kind, changes), place.weights.read_bytes()
    content = other_weights(place.weights) if other else right
    if moment is None:
        write_in_place(place.weights, content)
        failure = run(job)
    else:
        with Hand(job, moment, lambda: write_in_place(place.weights, content)) as hand:
            failure = run(job)
        assert hand.acted, job.log.read_text()
    write_in_place(place.weights, right)
    if failure:
        assert made(job) is None and str(place.weights) in failure
        assert run(place.job(kind, changes)) == ""
    return failure, published(job)


@pytest.fixture(scope="module")
def calm_policy(place: Place, tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Artifact[Any]:
    return undisturbed(place, tmp_path_factory.mktemp("calm") / "place", by_fork(forker), "policy")


@pytest.mark.parametrize("other", [False, True], ids=["the same bytes", "others"])
def test_policy_with_base_rewritten_after_reading_is_unchanged(
    place: Place, calm_policy: Artifact[Any], tmp_path: Path, forker: Forker, other: bool
) -> None:
    """The events have a note about the change."""
    there = place.copied_to(tmp_path / "place")
    failure, found = disturbed(there, by_fork(forker), "policy", step(3), other)
    assert (failure, found.fingerprint) == ("", calm_policy.fingerprint)
    assert any(note.startswith(f"{there.weights} changed ") for note in notes_of(there))


def remove(weights: Path) -> None:
    shutil.rmtree(weights.parent)


def replace(weights: Path) -> None:
    (new := weights.with_name("new")).write_bytes(other_weights(weights))
    new.replace(weights)


@pytest.mark.parametrize("change", [remove, replace])
def test_policy_with_base_removed_or_replaced_after_reading_is_unchanged(
    place: Place, calm_policy: Artifact[Any], tmp_path: Path, forker: Forker, change: Callable[[Path], None]
) -> None:
    there = place.copied_to(tmp_path / "place")
    job = there.job("policy")
    with Hand(job, step(3), lambda: change(there.weights)) as hand:
        assert by_fork(forker)(job) == ""
    assert hand.acted and published(job).fingerprint == calm_policy.fingerprint
    assert any(str(there.weights) in note for note in notes_of(there))


def notes_of(place: Place) -> list[str]:
    return [e["text"] for e in read_events(place.root / "jobs/policy/events.jsonl") if e["event"] == "note"]


@pytest.mark.system
@pytest.mark.parametrize("moment", [None, phase("score sequences")], ids=["before it begins", "scoring"])
def test_reference_with_rewritten_base_keeps_no_wrong_logprobs(
    place: Place, tmp_path: Path, forker: Forker, moment: Moment | None
) -> None:
    """The next run must not find log-probs of the changed weights in the cache."""
    run = by_fork(forker)
    calm = undisturbed(place, tmp_path / "calm", run, "reference")
    failure, found = disturbed(place.copied_to(tmp_path / "place"), run, "reference", moment, other=True)
    assert bool(failure) == (moment is None) and found.fingerprint == calm.fingerprint


# The tests below take minutes: each case starts torchrun twice or more.


@pytest.fixture(scope="module")
def places(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    """Yield places by their content beside pairs, table and base: nothing, a policy, or an adapter."""
    root, found = tmp_path_factory.mktemp("places"), {"": place}
    for name, changes in {"policy": {}, "adapter": EXPORTED}.items():
        policy = undisturbed(place, root / f"of-{name}", by_launcher, "policy", changes)
        found[name] = place.copied_to(root / name)
        found[name].publish("policy", policy.folder, policy.fingerprint)
    yield found


@pytest.fixture(scope="module")
def calm(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Artifact[Any]]:
    """Return a function that gives the artifact of an undisturbed job. Each job runs once."""
    root = tmp_path_factory.mktemp("calm")
    known: dict[str, Artifact[Any]] = {}

    def find(there: str, kind: JobKind, changes: dict[str, Any]) -> Artifact[Any]:
        name = f"{there}-{kind}-{len(changes)}"
        if name not in known:
            known[name] = undisturbed(places[there], root / name, by_launcher, kind, changes)
        return known[name]

    return find


MOMENTS: dict[str, Moment | None] = {
    "before it begins": None,
    "reading": phase("reading pairs"),
    "looking up": phase("look up"),
    "loading": phase("loading"),
    "proof": phase("reference check"),
    "scoring": phase("score "),
    "progress": lambda event: event["event"] == "progress",
    "step 3": step(3),
    "answers": phase("sample answers"),
    "merging": phase("merge"),
    "saving": phase("saving"),
}
# Place, kind of job, changed settings, moments while the base is read, and moments after that.
CASES: list[tuple[str, JobKind, dict[str, Any], str, str]] = [
    ("", "policy", {}, "before it begins, reading, loading", "proof, step 3, saving"),
    ("", "policy", MERGED, "loading, step 3", ""),
    ("", "reference", {}, "before it begins, looking up, loading", "scoring, progress"),
    ("", "sft", {}, "loading", "step 3"),
    ("policy", "evaluation", {}, "before it begins, scoring, answers", ""),
    ("adapter", "evaluation", {}, "scoring, answers", ""),
    ("adapter", "merge", {}, "before it begins, merging", ""),
]


def cases() -> Iterator[Any]:
    """Yield a case for each moment. Only the first of each job carries the marker `system`, the others `long`."""
    for there, kind, changes, before, after in CASES:
        for index, moment in enumerate(filter(None, f"{before}, {after}".split(", "))):
            was_read = moment in after.split(", ")
            name = " ".join(filter(None, (there, kind, *changes, moment)))
            marks = pytest.mark.long if index else pytest.mark.system
            yield pytest.param(there, kind, changes, MOMENTS[moment], was_read, id=name, marks=marks)


@pytest.mark.parametrize("other", [False, True], ids=["the same bytes", "others"])
@pytest.mark.parametrize(("there", "kind", "changes", "moment", "was_read"), list(cases()))
def test_job_with_base_rewritten_at_any_moment_is_right_or_fails(
    places: Places,
    calm: Callable[..., Artifact[Any]],
    tmp_path: Path,
    there: str,
    kind: JobKind,
    changes: dict[str, Any],
    moment: Moment | None,
    was_read: bool,
    other: bool,
) -> None:
    place = places[there].copied_to(tmp_path / "place")
    failure, found = disturbed(place, by_launcher, kind, moment, other, changes)
    assert found.fingerprint == calm(there, kind, changes).fingerprint
    if was_read or (moment is None and not other):
        assert failure == ""
    if moment is None and other:
        assert "[file-changed]" in failure
