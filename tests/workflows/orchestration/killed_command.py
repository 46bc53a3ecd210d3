"""A command that is killed while its job runs on a cluster."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.workflows.commands.test_run_interruption import until_steps
from tests.workflows.homes import PEDIGREE, Home


def check_next_command_follows_the_job(home: Home, recipe: Path, undisturbed: dict[str, Any]) -> None:
    """Kill a command after two steps of its job, and run it again: it gives the artifacts of the undisturbed run.

    `gc --delete` between the two removes nothing of the job.
    """
    process = subprocess.Popen(
        [PEDIGREE, "run", str(recipe)], env=home.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until_steps(home.path, 2)
    process.kill()
    process.wait()
    assert home.pedigree("gc", "--delete").returncode == 0
    again = home.pedigree("run", str(recipe), "--json")
    assert again.returncode == 0, again.stderr
    found, expected = (
        {asset["asset"]: asset["fingerprint"] for asset in report["assets"]}
        for report in (json.loads(again.stdout), undisturbed)
    )
    assert found == expected
