"""Run the commands of the tutorial, the quickstart and the guides, in the order of each page."""

from pathlib import Path

import pytest

from tests.docs.fences import PAGES, Fence, fences
from tests.docs.project import Project

RUN = [
    name for name, page in PAGES.items() if any(f.language in ("bash", "python") and not f.mark for f in fences(page))
]


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_page_commands_give_the_shown_output(name: str, project: Project):
    project.play(fences(PAGES[name]))


def empty_project(place: Path) -> Project:
    (place / "project").mkdir()
    return Project(place / "project")


def test_play_with_other_output_fails(tmp_path: Path):
    project = Project(tmp_path)
    page = [Fence("page:1", "bash", "echo 3 assets are stale"), Fence("page:4", "text", "4 assets are stale\n")]
    project.play(page)
    with pytest.raises(AssertionError, match="page:9"):
        project.play([*page, Fence("page:9", "text", "4 assets are fresh\n")])


def test_play_with_failing_command_fails(tmp_path: Path):
    with pytest.raises(AssertionError, match="exit 1"):
        Project(tmp_path).play([Fence("page:1", "bash", "false\necho done")])


def test_play_keeps_folder_and_variables_between_fences(tmp_path: Path):
    (tmp_path / "project/inner").mkdir(parents=True)
    page = [Fence("page:1", "bash", "cd inner; export NAME=demo"), Fence("page:2", "bash", "echo $NAME in ${PWD##*/}")]
    Project(tmp_path / "project").play([*page, Fence("page:3", "text", "demo in inner\n")])
