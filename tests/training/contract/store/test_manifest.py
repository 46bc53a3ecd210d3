"""A manifest promises bytes; the error for any other bytes names the file."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.privileges import without_privileges
from training.contract.errors import CorruptArtifact, UnreadableArtifact
from training.contract.identity.fingerprint import value_digest
from training.contract.identity.hash_cache import HashCache
from training.contract.store.manifest import (
    MANIFEST,
    Derivation,
    FileEntry,
    Manifest,
    Source,
    list_files,
    read_manifest,
    verify_files,
)

DERIVATION = Derivation(
    kind="policy",
    code_version="1",
    inputs={"pairs": Source(kind="tokenized_pairs", fingerprint="a" * 64)},
    settings={"beta": 0.1},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "part").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"0123456789")
    (tmp_path / "empty-weights.bin").touch()
    (tmp_path / "part" / "table.txt").write_text("one\n")
    return tmp_path


def manifest_of(folder: Path) -> Manifest:
    return Manifest(
        kind="policy",
        fingerprint="f" * 64,
        made_from=DERIVATION,
        libraries={},
        created="2026-01-01",
        files=list_files(folder),
        details={},
    )


def test_every_file_is_listed_with_its_size_and_hash(folder):
    (folder / MANIFEST).write_text("{}")
    assert list_files(folder) == {
        "part/table.txt": FileEntry(bytes=4, sha256=hashlib.sha256(b"one\n").hexdigest()),
        "empty-weights.bin": FileEntry(bytes=0, sha256=hashlib.sha256(b"").hexdigest()),
        "weights.bin": FileEntry(bytes=10, sha256=hashlib.sha256(b"0123456789").hexdigest()),
    }


def test_what_was_published_is_accepted(folder):
    verify_files(folder, manifest_of(folder))


def flip_bit(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"0123456788")


def truncate(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"012345678")


def remove(folder: Path) -> None:
    (folder / "weights.bin").unlink()


def add_file(folder: Path) -> None:
    (folder / "part" / "weights.bin").write_bytes(b"0123456789")


def add_hidden_file(folder: Path) -> None:
    (folder / ".weights.bin").write_bytes(b"")


def link_to_same_bytes(folder: Path) -> None:
    (folder / "weights.bin").rename(folder.parent / "elsewhere-weights.bin")
    (folder / "weights.bin").symlink_to(folder.parent / "elsewhere-weights.bin")


def add_link_to_folder(folder: Path) -> None:
    (folder / "linked-weights.bin").symlink_to(folder / "part")


def turn_into_pipe(folder: Path) -> None:
    """Replace a file of 0 bytes by a pipe of 0 bytes: reading a pipe would block forever."""
    (folder / "empty-weights.bin").unlink()
    os.mkfifo(folder / "empty-weights.bin")


def turn_into_folder(folder: Path) -> None:
    (folder / "weights.bin").unlink()
    (folder / "weights.bin").mkdir()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip_bit, r"\[wrong-hash\]"),
    (truncate, r" 9 bytes.* 10 .*\[wrong-size\]"),
    (remove, r" 10 .*\[missing-file\]"),
    (add_file, r"\[foreign-file\]"),
    (add_hidden_file, r"\[foreign-file\]"),
    (link_to_same_bytes, r"elsewhere-weights\.bin.*\[symbolic-link\]"),
    (add_link_to_folder, r"\[foreign-file\]"),
    (turn_into_folder, r"\[not-a-plain-file\]"),
    (turn_into_pipe, r"\[not-a-plain-file\]"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_verify_files_other_than_published_raises_with_name(folder, damage, message):
    manifest = manifest_of(folder)
    damage(folder)
    with pytest.raises(CorruptArtifact, match=rf"weights\.bin.*{message}"):
        verify_files(folder, manifest)


@pytest.mark.parametrize("mode", [0o300, 0o000], ids=["not to be listed", "not to be entered"])
def test_verify_files_in_unreadable_folder_raises_unreadable_not_corrupt(mode):
    """A corrupt artifact is set aside; this one only needs other permissions."""
    with without_privileges() as place:
        (place / "part").mkdir()
        (place / "part" / "table.txt").write_text("one\n")
        manifest = manifest_of(place)
        (place / "part").chmod(mode)
        try:
            if mode & 0o100:
                verify_files(place, manifest)
            else:
                with pytest.raises(UnreadableArtifact, match=r"table\.txt.*\[unreadable-artifact\]"):
                    verify_files(place, manifest)
        finally:
            (place / "part").chmod(0o700)


def test_verify_files_without_hashes_accepts_a_flipped_bit_but_not_another_size(folder):
    manifest = manifest_of(folder)
    flip_bit(folder)
    verify_files(folder, manifest, hashes=False)
    truncate(folder)
    with pytest.raises(CorruptArtifact, match=r"\[wrong-size\]"):
        verify_files(folder, manifest, hashes=False)


@pytest.mark.parametrize(
    "make", [lambda p: p.symlink_to("/etc/hostname"), lambda p: p.symlink_to("nowhere"), os.mkfifo]
)
def test_links_and_pipes_are_not_published(folder, make):
    make(folder / "odd")
    with pytest.raises(CorruptArtifact, match=r"/odd .*\[not-a-plain-file\]"):
        list_files(folder)


DEEP = b"[" * 100_000 + b"]" * 100_000


def with_seal(content: Any) -> bytes:
    return json.dumps({**content, "sha256": value_digest(content).hex()}).encode()


FORMS = [b"", b"{", b"[]", b"null", with_seal({"kind": "policy"}), b"\xff\xfe", b'{"kind": 1e999}', DEEP]


@pytest.mark.parametrize("content", FORMS, ids=lambda content: repr(content[:20]))
def test_read_manifest_of_another_form_raises_with_name(tmp_path, content):
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(CorruptArtifact, match=rf"{MANIFEST}(?s:.*)\[corrupt-manifest\]"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "name", ["../weights.bin", "/etc/hostname", "part/../../x", "", ".", "..", "a//b", "./a", MANIFEST]
)
def test_read_manifest_with_file_name_outside_the_folder_raises(folder, name):
    content = manifest_of(folder).model_dump(mode="json")
    content["files"][name] = {"bytes": 10, "sha256": "0" * 64}
    (folder / MANIFEST).write_bytes(with_seal(content))
    with pytest.raises(CorruptArtifact, match=r"does not name a file inside(?s:.*)\[corrupt-manifest\]"):
        read_manifest(folder)


def test_read_manifest_through_a_link_raises(folder):
    elsewhere = folder.with_name(f"{folder.name}-elsewhere.json")
    elsewhere.write_bytes(manifest_of(folder).dumps())
    (folder / MANIFEST).symlink_to(elsewhere)
    with pytest.raises(CorruptArtifact, match=r"elsewhere\.json.*\[symbolic-link\]"):
        read_manifest(folder)


@pytest.mark.parametrize("make", [lambda at: at.write_bytes(b""), lambda at: (at / MANIFEST).mkdir(parents=True)])
def test_read_manifest_from_a_file_or_with_a_folder_in_its_place_raises_corrupt(tmp_path, make):
    """Unreadable artifacts are not set aside, so a file in the place of an artifact would stop every run."""
    make(tmp_path / "artifact")
    with pytest.raises(CorruptArtifact, match=r"artifact/manifest\.json .*\[missing-file\]"):
        read_manifest(tmp_path / "artifact")


def test_verify_files_of_linked_folder_raises(folder):
    manifest, link = manifest_of(folder), folder.with_name(f"{folder.name}-link")
    link.symlink_to(folder)
    with pytest.raises(CorruptArtifact, match=r"-link .*\[symbolic-link\]"):
        verify_files(link, manifest)


def test_a_folder_inside_that_is_a_link_is_refused(folder):
    manifest = manifest_of(folder)
    elsewhere = folder.with_name(f"{folder.name}-elsewhere")
    (folder / "part").rename(elsewhere)
    (folder / "part").symlink_to(elsewhere)
    with pytest.raises(CorruptArtifact, match="part"):
        verify_files(folder, manifest)


def test_verify_files_with_cache_reads_only_written_files(folder, tmp_path_factory, monkeypatch):
    """The cache detects a write even if the modification time is reset."""
    manifest = manifest_of(folder)
    cache = HashCache(tmp_path_factory.mktemp("home") / "hashes.json", settle_seconds=0.1)
    time.sleep(0.2)
    verify_files(folder, manifest, cache=cache)
    with monkeypatch.context() as unread:
        unread.setattr("training.contract.identity.file_hashing.digest_file", None)
        verify_files(folder, manifest, cache=cache)
    status = (folder / "weights.bin").stat()
    flip_bit(folder)
    os.utime(folder / "weights.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CorruptArtifact, match=r"weights\.bin .*\[wrong-hash\]"):
        verify_files(folder, manifest, cache=cache)


def test_read_manifest_with_unknown_field_raises(folder):
    (folder / MANIFEST).write_bytes(with_seal({**manifest_of(folder).model_dump(mode="json"), "trust": True}))
    with pytest.raises(CorruptArtifact, match="trust"):
        read_manifest(folder)


def test_read_manifest_returns_the_written_one_and_raises_without_checksum(folder):
    manifest = manifest_of(folder)
    (folder / MANIFEST).write_bytes(manifest.dumps())
    assert read_manifest(folder) == manifest
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    with pytest.raises(CorruptArtifact, match=r"sha256 is None, .*\[corrupt-manifest\]"):
        read_manifest(folder)
    names = ("schema_version", "kind", "fingerprint", "made_from", "libraries", "created", "files", "details", "sha256")
    written = json.loads(manifest.dumps())
    assert tuple(written) == names and written["schema_version"] == 1, "as every store has them"


def test_read_manifest_with_any_flipped_bit_raises_or_is_equal(folder):
    """A flipped bit of JSON whitespace may leave the content equal."""
    manifest = manifest_of(folder).model_copy(update={"details": {"metrics": {"accuracy": 0.75}}})
    content = manifest.dumps()
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1
        (folder / MANIFEST).write_bytes(flipped)
        with contextlib.suppress(CorruptArtifact):
            assert read_manifest(folder) == manifest


OTHERS = [
    {"kind": "sft"},
    {"code_version": "2"},
    {"settings": {"beta": 0.2}},
    {"settings": {"beta": 0.1, "more": None}},
    {"inputs": {}},
    {"inputs": {"pairs": Source(kind="tokenized_pairs", fingerprint="b" * 64)}},
    {"inputs": {"pairs": Source(kind="raw_preferences", fingerprint="a" * 64)}},
    {"inputs": {"sources": Source(kind="tokenized_pairs", fingerprint="a" * 64)}},
]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_another_ingredient_another_key(change):
    assert DERIVATION.model_copy(update=change).key != DERIVATION.key


def test_the_same_ingredients_in_any_order_give_the_same_key():
    a, b = Source(kind="x", fingerprint="1"), Source(kind="y", fingerprint="2")
    one = Derivation(kind="policy", code_version="1", inputs={"a": a, "b": b}, settings={"x": 1, "y": 2})
    two = Derivation(settings={"y": 2, "x": 1}, inputs={"b": b, "a": a}, code_version="1", kind="policy")
    assert one.key == two.key == Derivation.model_validate_json(one.model_dump_json()).key
