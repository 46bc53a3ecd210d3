"""A run with secrets in its environment, on a real MLflow server: no file, parameter, tag or message has them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.workflows.homes import PEDIGREE, Home
from workflows.servers.server_processes import Server, free_port, serving

pytestmark = [pytest.mark.slow, pytest.mark.system]
PASSWORD = "swordfish-7f3a"
SECRETS = {
    "HF_TOKEN": "hf_swordfish-7f3b",
    "AWS_SECRET_ACCESS_KEY": "swordfish-7f3c",
    "MLFLOW_TRACKING_TOKEN": "swordfish-7f3d",
    "WANDB_API_KEY": "swordfish-7f3e",
}


@pytest.fixture
def mlflow_server(tmp_path):
    """Yield the address of MLflow's server over an empty database."""
    address = f"http://127.0.0.1:{free_port(0)}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", address.rpartition(":")[2], "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination",
        str(tmp_path / "files"),
    ]
    with serving([Server("MLflow", command, address, f"{address}/health", tmp_path / "server.log")], print):
        yield address


def found_in(folder: Path) -> list[str]:
    """Return the files in `folder` that have one of the secrets."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 100
    return [str(path) for path in files if b"swordfish" in path.read_bytes()]


def test_no_secret_is_written(small_recipe, tmp_path, mlflow_server):
    home = Home(tmp_path / "home")
    address = mlflow_server.replace("http://", f"http://me:{PASSWORD}@")
    environment = home.environment | SECRETS | {"MLFLOW_TRACKING_URI": address}
    for command in (["run", str(small_recipe)], ["status", str(small_recipe)], ["run", str(small_recipe), "--json"]):
        done = subprocess.run([PEDIGREE, *command], env=environment, capture_output=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr
        assert b"swordfish" not in done.stdout + done.stderr
    assert found_in(tmp_path) == []
