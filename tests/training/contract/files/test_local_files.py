"""A data file that was another while it was read is refused, whatever it is by the end."""

import os
import time
from pathlib import Path

import pytest

from training.contract.errors import DataError
from training.contract.files.local_files import check_unchanged
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.file_stamps import stamp_of


def test_a_file_that_was_another_in_between_is_refused(tmp_path: Path) -> None:
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
    with pytest.raises(DataError, match=rf"{file} changed while it was read: it is again what it was"):
        check_unchanged(file, sha256, before)
    with pytest.raises(DataError, match=rf"{file} changed while it was read: it was .* and is .*; run again"):
        check_unchanged(file, "0" * 64, before)
