"""A home in which a recipe was run once, with votes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workflows.disclosure.voted_home import VOTES
from tests.workflows.in_process import Baseline
from tests.workflows.prepared_homes import PreparedHomes


@pytest.fixture
def baseline(tmp_path: Path, prepared_homes: PreparedHomes) -> Iterator[Baseline]:
    """Yield a home in which the recipe was run once, with votes."""
    with prepared_homes.copied_to(tmp_path, {"plain": VOTES}) as made:
        yield made
