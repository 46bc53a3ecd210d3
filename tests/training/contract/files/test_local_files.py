"""A data file that changes while it is read raises an error, even if its content is the same again."""

import os
import time
from pathlib import Path

import pytest

from training.contract.errors import DataError
from training.contract.files.local_files import check_unchanged
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.file_stamps import stamp_of


def test_check_unchanged_of_file_that_changed_and_changed_back_raises(tmp_path: Path) -> None:
    (file := tmp_path / "rows.jsonl").write_text("{}\n")
    before, sha256 = stamp_of(file), hash_file(file)
    check_unchanged(file, sha256, before)
    file.chmod(0o600)
    os.link(file, tmp_path / "backup")
    check_unchanged(file, sha256, before)
    time.sleep(0.02)  # another tick of the clock
    for content in ('{"a": 1}\n', "{}\n"):
        file.write_text(content)
    check_unchanged(file, sha256)
    with pytest.raises(DataError, match=rf"{file} .*written to.*\[file-changed\]"):
        check_unchanged(file, sha256, before)
    with pytest.raises(DataError, match=rf"{file} .*{'0' * 12} .*{sha256[:12]}.*\[file-changed\]"):
        check_unchanged(file, "0" * 64, before)
