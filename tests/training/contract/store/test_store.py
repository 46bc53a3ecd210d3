"""The store with two writers, killed writers, full disks and damaged files."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ConfigDict

from training.contract.errors import CorruptArtifact, CorruptRecord, StoreError
from training.contract.identity.hash_cache import HashCache
from training.contract.protocol.artifacts import POLICY
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.artifact_kind import ArtifactKind, Details
from training.contract.store.manifest import MANIFEST, Derivation
from training.contract.store.store import Store
from training.contract.system.atomic_io import write_durably


class AnyDetails(Details):
    """Details with any fields."""

    model_config = ConfigDict(extra="allow")


KIND, FINGERPRINT = "policy", "f" * 64
ANY = ArtifactKind(KIND, AnyDetails)


def derivation(version: str = "1") -> Derivation:
    return Derivation(kind=KIND, code_version=version, inputs={}, settings={})


def publish(
    store: Store, text: str = "hello", version: str = "1", fingerprint: str = FINGERPRINT, **details: object
) -> Artifact[Any]:
    with store.staging() as staging:
        (staging / "part").mkdir()
        (staging / "part" / "text.txt").write_text(text)
        return store.publish(staging, derivation(version), JobResult(fingerprint, AnyDetails(**details)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_published_artifact_is_found_by_key_and_by_fingerprint(store):
    published = publish(store, pairs=3)
    for found in (store.find(ANY, derivation().key), store.open(ANY, FINGERPRINT), published.of_kind(ANY)):
        assert found is not None and found.fingerprint == FINGERPRINT and found.details == AnyDetails(pairs=3)
        assert found.file("part/text.txt").read_text() == "hello" and found.derivation == derivation()
    assert store.fingerprints(KIND) == [FINGERPRINT]
    assert list((store.root / "staging").iterdir()) == []


def test_details_of_an_unknown_form_raise_with_folder_and_field(store):
    """Another version may have written the manifest. Details are read only if they are used."""
    artifact = publish(store, steps="many", rewards_finite=True)
    found = store.open(POLICY, FINGERPRINT)
    assert found.stored_details["steps"] == "many"
    with pytest.raises(StoreError, match=rf"{artifact.folder} .*steps: .*\[unknown-details\]") as caught:
        found.details  # noqa: B018
    assert caught.value.code == "unknown-details"


def test_details_of_an_earlier_and_of_a_later_version_are_read(store):
    """An earlier version lacks fields, and a later one has more. JSON has null for NaN."""
    figures: dict[str, Any] = {
        "rewards_finite": True,
        "step0_loss": math.nan,
        "step0_expected": 0.5,
        "step0_allowed": 0.1,
    }
    publish(store, **figures, of_a_later_version=[1])
    details = store.open(POLICY, FINGERPRINT).details
    assert (details.steps, details.eval, details.step0_expected) == (0, {}, 0.5) and math.isnan(details.step0_loss)


def test_find_with_cache_writes_hashes_to_it(store, tmp_path):
    """Without a cache, `pedigree status` would read every artifact each time."""
    published, cache = publish(store), tmp_path / "hashes.json"
    assert store.find(KIND, derivation().key, cache=HashCache(cache, settle_seconds=0)) is not None
    assert str(published.file("part/text.txt")) in cache.read_text()


def test_adopt_takes_only_an_intact_artifact_of_the_fingerprint(store, tmp_path):
    published = publish(store, pairs=3)
    other = Store(tmp_path / "other")

    def adopt(fingerprint: str, text: str = "hello") -> Artifact[Any]:
        with other.staging() as staging:
            copy = shutil.copytree(published.folder, staging / "copy")
            (copy / "part" / "text.txt").write_text(text)
            return other.adopt(copy, KIND, fingerprint)

    with pytest.raises(CorruptArtifact, match=r"ffffffffffff.*eeeeeeeeeeee.*\[wrong-artifact\]"):
        adopt("e" * 64)
    with pytest.raises(CorruptArtifact, match=r"part/text\.txt.*\[wrong-hash\]"):
        adopt(FINGERPRINT, "jello")
    assert other.fingerprints(KIND) == []
    for _ in range(2):
        found = adopt(FINGERPRINT)
        assert found.manifest == published.manifest == other.open(KIND, FINGERPRINT).manifest
    assert other.find(KIND, derivation().key) is None
    assert list((other.root / "staging").iterdir()) == []


def test_open_of_missing_artifact_raises_and_find_returns_none(store):
    assert store.find(KIND, derivation().key) is None and store.fingerprints(KIND) == []
    with pytest.raises(StoreError, match=r"policy ffffffffffff .*materialize.*\[no-artifact\]"):
        store.open(KIND, FINGERPRINT)


def test_two_derivations_of_one_content_share_files_and_keep_their_details(store):
    first, second = publish(store, version="1", way="first"), publish(store, version="2", way="second")
    assert first.folder == second.folder
    assert (second.of_kind(ANY).details, second.derivation) == (AnyDetails(way="second"), derivation("2"))
    assert store.find(ANY, derivation("1").key).details == AnyDetails(way="first")
    assert store.find(ANY, derivation("2").key).details == AnyDetails(way="second")
    assert store.find(KIND, derivation("2").key).derivation.code_version == "2"


def test_manifest_holds_derivation_and_libraries(store):
    manifest = json.loads((publish(store).folder / MANIFEST).read_text())
    assert manifest["made_from"] == derivation().model_dump(mode="json")
    assert {"python", "numpy", "torch"} <= set(manifest["libraries"])


def test_find_of_artifact_with_flipped_bit_raises(store):
    path = publish(store).file("part/text.txt")
    path.write_text("hellp")
    with pytest.raises(CorruptArtifact, match=r"text\.txt .*\[wrong-hash\]"):
        store.find(KIND, derivation().key)
    assert store.find(KIND, derivation().key, hashes=False) is not None


def test_open_of_artifact_in_another_folder_raises(store):
    folder = publish(store).folder
    for kind, fingerprint in ((KIND, "e" * 64), ("merged", FINGERPRINT)):
        shutil.copytree(folder, store.folder(kind, fingerprint))
        with pytest.raises(CorruptArtifact, match=rf"expected {kind} {fingerprint[:12]} \[wrong-artifact\]"):
            store.open(kind, fingerprint)


def test_a_link_is_not_published(store):
    with store.staging() as staging:
        (staging / "weights").symlink_to("/etc/hostname")
        with pytest.raises(CorruptArtifact, match=r"/weights .*\[not-a-plain-file\]"):
            store.publish(staging, derivation(), JobResult(FINGERPRINT))
    assert store.find(KIND, derivation().key) is None


def test_artifact_set_aside_is_kept_and_can_be_published_again(store):
    publish(store).file("part/text.txt").write_text("hellp")
    folder = store.set_aside(KIND, FINGERPRINT)
    assert (folder / "part" / "text.txt").read_text() == "hellp"
    assert store.find(KIND, derivation().key) is None
    publish(store)
    assert store.find(KIND, derivation().key) is not None


def flip_bit(folder: Path) -> None:
    (folder / "part" / "text.txt").write_text("hellp")


def lose_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def lose_everything(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def replace_by_dangling_link(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("nowhere")


@pytest.mark.parametrize("damage", [flip_bit, lose_manifest, lose_everything, replace_by_dangling_link])
def test_publishing_again_repairs_a_corrupt_artifact(store, damage):
    damage(publish(store).folder)
    publish(store, version="2")
    for version in ("1", "2"):
        assert store.find(KIND, derivation(version).key).file("part/text.txt").read_text() == "hello"


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b'{"fingerprint": "../../etc"}', b"\xff"])
def test_find_with_record_of_another_form_raises_with_name(store, content):
    publish(store)
    (record,) = (store.root / "keys" / KIND).iterdir()
    record.write_bytes(content)
    with pytest.raises(CorruptArtifact, match=rf"{record.name}(?s:.*)\[corrupt-record\]"):
        store.find(KIND, derivation().key)


@pytest.mark.parametrize("repaired", [True, False])
def test_changed_record_is_refused_and_repaired_from_the_manifest(store, repaired):
    """The change is a number in the details, or the record of another derivation. The manifest holds version 1 only.

    An older artifact has the same derivation, and another artifact is unreadable: the repair uses the latest manifest.
    """
    older = publish(store, fingerprint="e" * 64, accuracy=0.5)
    manifest = older.manifest.model_copy(update={"created": "2020-01-01T00:00:00+00:00"})
    (older.folder / MANIFEST).write_bytes(manifest.dumps())
    lose_everything(publish(store, fingerprint="d" * 64, version="3").folder)
    for version in ("1", "2"):
        publish(store, version=version, accuracy=0.25)
    first, second = (store.root / "keys" / KIND / f"{derivation(version).key}.json" for version in ("1", "2"))
    record, other = (first, second) if repaired else (second, first)
    intact = record.read_bytes()
    for content in (intact.replace(b"0.25", b"0.75"), other.read_bytes()):
        record.write_bytes(content)
        with pytest.raises(CorruptRecord, match=rf"{record.name}.*\[corrupt-record\]"):
            store.find(KIND, record.stem)
        assert store.repair_record(KIND, record.stem).read_bytes() == content
        assert record.exists() == repaired and (not repaired or record.read_bytes() == intact)


def test_artifact_of_another_user_is_reused(store, monkeypatch):
    """A folder from a backup may belong to another user, so it cannot be marked as used."""
    publish(store)

    def refused(path: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(os, "utime", refused)
    assert store.reuse(ANY, derivation().key).fingerprint == FINGERPRINT
    assert publish(store, version="2").fingerprint == FINGERPRINT


@pytest.mark.parametrize(
    ("call", "number"), [("fsync", errno.ENOSPC), ("fsync", errno.EDQUOT), ("rename", errno.EDQUOT)]
)
def test_publish_on_full_disk_raises_with_path_and_leaves_no_files(store, monkeypatch, call, number):
    """The disk, or the user's quota, is full: a call raises the operating system's error."""
    publish(store, fingerprint="e" * 64, version="0")

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, full)
    message = rf"publish policy in .*/store \([\d,]+ bytes free\): .*{os.strerror(number)}; .*\[disk-full\]"
    with pytest.raises(StoreError, match=message):
        publish(store)
    monkeypatch.undo()
    assert store.find(KIND, derivation().key) is None and store.fingerprints(KIND) == ["e" * 64]
    assert list((store.root / "staging").iterdir()) == []
    with pytest.raises(FileNotFoundError), store.staging() as staging:  # other errors pass unchanged
        (staging / "nowhere").read_bytes()
    publish(store)


def test_publish_without_permission_raises_with_umask_hint(store, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(
        StoreError, match=r"publish policy in .*: .*Permission denied; .* umask 002 .*\[not-permitted\]"
    ):
        publish(store)


PUBLISHER = """
import sys, time
from pathlib import Path
from training.contract.store.manifest import Derivation
from training.contract.store.store import JobResult, Store

store, start = Store(Path(sys.argv[1])), float(sys.argv[2])
with store.staging() as staging:
    for name in "abcdefgh":
        (staging / name).write_bytes(name.encode() * 100_000)
    time.sleep(max(0.0, start - time.time()))
    store.publish(staging, Derivation(kind="policy", code_version="1", inputs={}, settings={}), JobResult("f" * 64))
"""


def test_publish_by_two_processes_at_once_leaves_one_artifact(store):
    command = [sys.executable, "-c", PUBLISHER, str(store.root), str(time.time() + 1.5)]
    publishers = [subprocess.Popen(command) for _ in range(2)]
    assert [p.wait(60) for p in publishers] == [0, 0]
    assert store.fingerprints(KIND) == [FINGERPRINT]
    artifact = store.find(KIND, derivation().key)
    assert artifact is not None and set(artifact.manifest.files) == set("abcdefgh")
    assert list((store.root / "staging").iterdir()) == [] and not (store.root / "corrupt").exists()


LOCKER = """
import sys
from pathlib import Path
from training.contract.store.store import Store
with Store(Path(sys.argv[1])).lock("policy", "k"):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_lock_of_a_key_has_one_holder_and_is_free_after_its_death(store):
    def locker() -> "subprocess.Popen[str]":
        arguments = [sys.executable, "-c", LOCKER, str(store.root)]
        return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    first = locker()
    assert first.stdout is not None and first.stdout.readline() == "locked\n"
    second = locker()
    time.sleep(0.7)
    assert second.stdout is not None
    os.set_blocking(second.stdout.fileno(), False)
    assert not second.stdout.readline(), "two writers hold one key"
    first.kill()
    os.set_blocking(second.stdout.fileno(), True)
    assert second.stdout.readline() == "locked\n"
    second.communicate()
    first.communicate()


def test_write_durably_that_fails_keeps_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    write_durably(path, b"before")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        write_durably(path, b"after")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
