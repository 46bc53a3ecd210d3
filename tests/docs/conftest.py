"""A copy of the project in which the demo was run, for all pages."""

from pathlib import Path

import pytest
from filelock import FileLock

from tests.docs.fences import Fence
from tests.docs.project import Project, copy_project


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Project:
    """Return a project in which `make demo` was run once, for all test processes of this session."""
    own = tmp_path_factory.getbasetemp()
    place = (own if worker_id == "master" else own.parent) / "demo-project"
    place.mkdir(exist_ok=True)
    project, output = Project(place / "project"), place / "output"
    with FileLock(place / "lock"):
        if not output.exists():
            copy_project(project.folder)
            output.write_text(project.shell(Fence("the demo", "bash", "make demo"), "make demo"))
    project.output = output.read_text()
    return project


@pytest.fixture
def project(tmp_path: Path, demo: Project) -> Project:
    return Project(copy_project(tmp_path / "project"), demo)
