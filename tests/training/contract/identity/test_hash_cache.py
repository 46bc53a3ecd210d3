"""The cache reads unchanged files once, and never returns an outdated hash. The oracle is `hash_file` of the current bytes."""

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

SETTLE = 0.1  # seconds; far above a tick of this machine's filesystems (milliseconds)


class RecordingHasher:
    """`hash_files`; `read` holds the names of the hashed files."""

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
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "hashes.json"


def read_files(path: Path, *files: Path) -> list[str]:
    """Hash the files with a new cache, like another process. Check the digests; return the names of the files read."""
    hasher = RecordingHasher()
    assert HashCache(path, SETTLE).digests("bytes", files, hasher) == [hash_file(file) for file in files]
    return hasher.read


def fill_cache(path: Path, *files: Path) -> None:
    """Wait until the files are old enough, and write them to the cache."""
    time.sleep(1.5 * SETTLE)
    read_files(path, *files)
    assert read_files(path, *files) == []


def test_digests_reads_a_file_once(file, path, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"more")
    fill_cache(path, file)
    assert read_files(path, other, file) == ["other"]
    assert read_files(path, file, other, file) == []


def test_digests_of_one_object_reads_a_file_once(file, path):
    time.sleep(1.5 * SETTLE)
    hasher, cache = RecordingHasher(), HashCache(path, SETTLE)
    for _ in range(3):
        cache.digests("bytes", [file], hasher)
    assert hasher.read == ["weights"]


def test_digests_of_two_kinds_are_separate(file, path):
    fill_cache(path, file)
    assert HashCache(path, SETTLE).digests("length", [file], lambda files: [len(f.read_bytes()) for f in files]) == [6]
    assert read_files(path, file) == []


def edit(file: Path) -> None:
    file.write_bytes(b"after!")


def edit_and_set_the_time_back(file: Path) -> None:
    status = file.stat()
    edit(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == status.st_mtime_ns


def replace(file: Path) -> None:
    new = file.with_name("new")
    new.write_bytes(b"after!")
    status = file.stat()
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
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
def test_changed_file_is_read_again(file, path, change):
    fill_cache(path, file)
    change(file)
    assert read_files(path, file) == ["weights"]


def test_file_changed_while_it_is_hashed_is_hashed_again(file, path):
    """The hash may be of the old or of the new bytes."""

    def read_before(files: Sequence[Path]) -> list[str]:
        digests = hash_files(files)
        edit_and_set_the_time_back(file)
        return digests

    def read_after(files: Sequence[Path]) -> list[str]:
        edit_and_set_the_time_back(file)
        return hash_files(files)

    for slow in (read_before, read_after):
        time.sleep(1.5 * SETTLE)
        HashCache(path, SETTLE).digests("bytes", [file], slow)
        assert read_files(path, file) == ["weights"]


def test_touched_file_is_read_once_more(file, path):
    fill_cache(path, file)
    file.touch()
    fill_cache(path, file)


def test_young_file_is_read_each_time_until_it_is_old_enough(file, path):
    """Two edits within one tick of the clock leave the same times. The age counts at the start of hashing."""

    def slow(files: Sequence[Path]) -> list[str]:
        time.sleep(1.5 * SETTLE)
        return hash_files(files)

    assert read_files(path, file) == ["weights"]
    HashCache(path, SETTLE).digests("bytes", [file], slow)
    assert read_files(path, file) == ["weights"]
    fill_cache(path, file)


def test_new_file_with_an_old_modification_time_is_young(file, path):
    """`cp -p` and `tar` create such files: another write within the same tick would leave the same times."""
    os.utime(file, ns=(0, 10**18))
    assert read_files(path, file) == read_files(path, file) == ["weights"]
    fill_cache(path, file)


def test_many_fast_edits_are_all_detected(file, path):
    """Same size, modification time reset: some pairs of edits fall into one tick of the kernel's clock."""
    status = file.stat()
    ticks = set()
    for number in range(300):
        file.write_bytes(b"%06d" % number)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        ticks.add(file.stat().st_ctime_ns)
        assert read_files(path, file) == ["weights"]
    assert len(ticks) > 1


def test_file_with_a_time_in_the_future_is_read_each_time(file, path):
    ahead = time.time() + 3600
    os.utime(file, (ahead, ahead))
    time.sleep(1.5 * SETTLE)
    assert read_files(path, file) == read_files(path, file) == ["weights"]


def test_file_edited_after_hashing_is_read_again(file, path):
    time.sleep(1.5 * SETTLE)

    def slow(files: Sequence[Path]) -> list[str]:
        digests = hash_files(files)
        edit(file)
        return digests

    HashCache(path, SETTLE).digests("bytes", [file], slow)
    assert read_files(path, file) == ["weights"]


def test_entries_of_missing_files_are_dropped(file, path, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"more")
    fill_cache(path, file)
    file.unlink()
    fill_cache(path, other)
    assert list(json.loads(path.read_bytes())["entries"]["bytes"]) == [str(other)]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"schema": 1, "sha256": "x"}'])
def test_corrupt_cache_counts_as_empty(file, path, content):
    fill_cache(path, file)
    path.write_bytes(content)
    assert read_files(path, file) == ["weights"]
    assert read_files(path, file) == []


def test_cache_with_a_changed_digest_counts_as_empty(file, path):
    fill_cache(path, file)
    digest = hash_file(file)
    text = path.read_text()
    assert digest in text
    path.write_text(text.replace(digest, digest[::-1]))
    assert read_files(path, file) == ["weights"]


def test_digests_with_unwritable_cache_only_warns(file, tmp_path, caplog):
    (tmp_path / "home").write_text("a file in place of the folder")
    time.sleep(1.5 * SETTLE)
    assert read_files(path := tmp_path / "home" / "hashes.json", file) == ["weights"]
    assert str(path) in caplog.text


def test_digests_of_missing_file_raises(path, tmp_path):
    with pytest.raises(FileNotFoundError):
        HashCache(path).digests("bytes", [tmp_path / "nowhere"], hash_files)


WRITER = """
import sys
from pathlib import Path
from training.contract.identity.file_hashing import hash_files
from training.contract.identity.hash_cache import HashCache
for path in sorted(Path(sys.argv[2]).iterdir()):
    HashCache(Path(sys.argv[1]), 0.1).digests("bytes", [path], hash_files)
"""


def test_concurrent_writers_keep_each_others_entries(path, tmp_path):
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
        for number in range(20):
            (folder / str(number)).write_bytes(os.urandom(100))
    time.sleep(1.5 * SETTLE)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(folder)]) for folder in folders]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert read_files(path, *(file for folder in folders for file in folder.iterdir())) == []
    assert sorted(file.name for file in path.parent.iterdir()) == ["hashes.json", "hashes.json.lock"]
