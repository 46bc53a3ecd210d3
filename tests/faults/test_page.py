"""The page of faults shows every fault that the tests make."""

import re
import subprocess
import sys

import pytest

from tests.faults.page import PAGE

FEWEST = 120


@pytest.mark.system
def test_page_has_a_row_for_each_test() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "long", "tests/faults"]
    done = subprocess.run(command, cwd=PAGE.parents[2], capture_output=True, text=True, check=True)
    tests = sum("::test_" in line for line in done.stdout.splitlines())
    rows = re.findall(r"^\| (?!stage|---)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == tests >= FEWEST
