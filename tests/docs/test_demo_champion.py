"""The demo: its champion gives more right answers to held-out prompts than the reference model.

The oracle is the facts in `make.py`: an answer is right if it ends with the right word.
"""

import json

import pytest

from tests.docs.project import Project
from workflows.defs.demo.score import count_right


@pytest.mark.slow
@pytest.mark.system
def test_champion_of_the_demo_is_right_more_often_and_brief(demo: Project):
    """Require 10 percentage points more right answers. The demo gives over 30; other machines round differently."""
    assert "version 1 is champion" in demo.output
    [file] = (demo.folder / ".pedigree/store/evaluation").glob("*/samples.json")
    samples = json.loads(file.read_text())
    right = {side: count_right(samples, side) for side in ("before", "after")}
    assert len(samples) >= 50, "all held-out prompts"
    assert right["after"] - right["before"] >= 0.1 * len(samples), right
    words = {side: sum(len(sample[side].split()) for sample in samples) for side in ("before", "after")}
    assert words["after"] < 0.75 * words["before"]
