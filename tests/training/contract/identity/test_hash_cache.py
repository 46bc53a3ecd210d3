"""The cache may save reading and must never be fooled. The oracle is `hash_file` itself, of the bytes as they are now."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from training.contract.identity.file_hashing import hash_file, hash_files
from training.contract.identity.hash_cache import HashCache

SETTLE = 0.1  # seconds; far above the tick of this machine's filesystems (milliseconds)


class Counting:
    """`hash_files`, which also says what it was asked to read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, files: Sequence[Path]) -> list[str]:
        self.read += [file.name for file in files]
        return hash_files(files)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"before")
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "home" / "hashes.json"


def look(place: Path, *files: Path) -> list[str]:
    """Ask a new cache, as another process would; what it had to read. Its answers must be the truth."""
    hasher = Counting()
    assert HashCache(place, SETTLE).digests("bytes", files, hasher) == [hash_file(file) for file in files]
    return hasher.read


def settled(place: Path, *files: Path) -> None:
    """Wait until the files are old enough, and let the cache take them in."""
    time.sleep(1.5 * SETTLE)
    look(place, *files)
    assert look(place, *files) == []


def test_a_file_is_read_once(file, place, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"more")
    settled(place, file)
    assert look(place, other, file) == ["other"]
    assert look(place, file, other, file) == []


def test_one_object_remembers_as_well(file, place):
    time.sleep(1.5 * SETTLE)
    hasher, cache = Counting(), HashCache(place, SETTLE)
    for _ in range(3):
        cache.digests("bytes", [file], hasher)
    assert hasher.read == ["weights"]


def test_kinds_of_digest_are_kept_apart(file, place):
    settled(place, file)
    assert HashCache(place, SETTLE).digests("length", [file], lambda files: [len(f.read_bytes()) for f in files]) == [6]
    assert look(place, file) == []


def edit(file: Path) -> None:
    file.write_bytes(b"after!")


def edit_and_set_the_time_back(file: Path) -> None:
    said = file.stat()
    edit(file)
    os.utime(file, ns=(said.st_atime_ns, said.st_mtime_ns))
    assert file.stat().st_mtime_ns == said.st_mtime_ns


def replace(file: Path) -> None:
    new = file.with_name("new")
    new.write_bytes(b"after!")
    said = file.stat()
    os.utime(new, ns=(said.st_atime_ns, said.st_mtime_ns))
    new.rename(file)


def point_a_link_elsewhere(file: Path) -> None:
    new = file.with_name("elsewhere")
    new.write_bytes(b"after!")
    file.unlink()
    file.symlink_to(new)


def lengthen(file: Path) -> None:
    with open(file, "ab") as opened:
        opened.write(b"!")


@pytest.mark.parametrize("change", [edit, edit_and_set_the_time_back, replace, point_a_link_elsewhere, lengthen])
def test_whatever_changes_a_file_is_seen(file, place, change):
    settled(place, file)
    change(file)
    assert look(place, file) == ["weights"]


def test_what_changes_while_it_is_hashed_is_hashed_again(file, place):
    """Whether the bytes of before were read, or those of after."""

    def read_before(files: Sequence[Path]) -> list[str]:
        found = hash_files(files)
        edit_and_set_the_time_back(file)
        return found

    def read_after(files: Sequence[Path]) -> list[str]:
        edit_and_set_the_time_back(file)
        return hash_files(files)

    for slow in (read_before, read_after):
        time.sleep(1.5 * SETTLE)
        HashCache(place, SETTLE).digests("bytes", [file], slow)
        assert look(place, file) == ["weights"]


def test_touching_without_an_edit_costs_one_reading(file, place):
    settled(place, file)
    file.touch()
    settled(place, file)


def test_a_young_file_is_read_each_time_until_it_is_old_enough(file, place):
    """The rule against edits within one tick of the clock, which leave the same times behind. Hashing may take longer."""

    def slow(files: Sequence[Path]) -> list[str]:
        time.sleep(1.5 * SETTLE)
        return hash_files(files)

    assert look(place, file) == ["weights"]
    HashCache(place, SETTLE).digests("bytes", [file], slow)
    assert look(place, file) == ["weights"]
    settled(place, file)


def test_a_file_of_an_old_time_that_came_just_now_is_young_too(file, place):
    """As `cp -p` and `tar` leave them: what was written before it within the same tick has the same times."""
    os.utime(file, ns=(0, 10**18))
    assert look(place, file) == look(place, file) == ["weights"]
    settled(place, file)


def test_many_edits_in_a_row_are_never_missed(file, place):
    """As fast as can be, same size, time set back: some pairs of edits fall into one tick of the kernel's clock."""
    said = file.stat()
    ticks = set()
    for number in range(300):
        file.write_bytes(b"%06d" % number)
        os.utime(file, ns=(said.st_atime_ns, said.st_mtime_ns))
        ticks.add(file.stat().st_ctime_ns)
        assert look(place, file) == ["weights"]
    assert len(ticks) > 1


def test_a_file_from_the_future_is_never_believed(file, place):
    ahead = time.time() + 3600
    os.utime(file, (ahead, ahead))
    time.sleep(1.5 * SETTLE)
    assert look(place, file) == look(place, file) == ["weights"]


def test_what_changes_while_it_is_hashed_is_not_remembered(file, place):
    time.sleep(1.5 * SETTLE)

    def slow(files: Sequence[Path]) -> list[str]:
        digests = hash_files(files)
        edit(file)
        return digests

    HashCache(place, SETTLE).digests("bytes", [file], slow)
    assert look(place, file) == ["weights"]


def test_files_that_are_gone_are_forgotten(file, place, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"more")
    settled(place, file)
    file.unlink()
    settled(place, other)
    assert list(json.loads(place.read_bytes())["entries"]["bytes"]) == [str(other)]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"schema": 1, "sha256": "x"}'])
def test_a_broken_cache_is_an_empty_one(file, place, content):
    settled(place, file)
    place.write_bytes(content)
    assert look(place, file) == ["weights"]
    assert look(place, file) == []


def test_a_changed_digit_in_the_cache_is_seen(file, place):
    settled(place, file)
    digest = hash_file(file)
    text = place.read_text()
    assert digest in text
    place.write_text(text.replace(digest, digest[::-1]))
    assert look(place, file) == ["weights"]


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(file, tmp_path, caplog):
    (tmp_path / "home").write_text("a file where the folder should be")
    time.sleep(1.5 * SETTLE)
    assert look(tmp_path / "home" / "hashes.json", file) == ["weights"]
    assert "not remembered" in caplog.text


def test_a_missing_file_is_the_callers_matter(place, tmp_path):
    with pytest.raises(FileNotFoundError):
        HashCache(place).digests("bytes", [tmp_path / "nowhere"], hash_files)


WRITER = """
import sys
from pathlib import Path
from training.contract.identity.file_hashing import hash_files
from training.contract.identity.hash_cache import HashCache
for path in sorted(Path(sys.argv[2]).iterdir()):
    HashCache(Path(sys.argv[1]), 0.1).digests("bytes", [path], hash_files)
"""


def test_processes_that_write_at_once_lose_nothing_of_each_other(place, tmp_path):
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
        for number in range(20):
            (folder / str(number)).write_bytes(os.urandom(100))
    time.sleep(1.5 * SETTLE)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(place), str(folder)]) for folder in folders]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert look(place, *(file for folder in folders for file in folder.iterdir())) == []
    assert sorted(p.name for p in place.parent.iterdir()) == ["hashes.json", "hashes.json.lock"]
