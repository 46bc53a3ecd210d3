"""The collectives of two real ranks and of one process, against numbers by hand."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import training
from tests import factories
from training.contract.config.recipe import Compute
from training.contract.errors import TrainingError
from training.contract.protocol.job import Job
from training.distributed import ALONE, check_same_devices, group
from training.launch.launcher import run_job
from training.launch.local import LocalEngine

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "launch" / "programs"


@pytest.fixture
def exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that runs `ranked_program` and returns the results of each rank."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROGRAMS), str(Path(training.__file__).parents[1])]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(ranks: int) -> list[dict[str, Any]]:
        job: Job = factories.job(
            "policy", tmp_path, compute=Compute(processes_per_node=ranks, device="cpu"), code_version="exchange"
        )
        run_job(LocalEngine("ranked_program"), job, lambda event: None)
        return [json.loads((job.folder / f"got-{rank}.json").read_text()) for rank in range(ranks)]

    return run


@pytest.mark.slow
def test_collectives_of_two_ranks_give_numbers_by_hand(exchange: Callable[..., Any]) -> None:
    """Rank r gives, with k = r + 1: k rows, r rows, k flags; sums of (1, 10) and 2 x (1, 10); rank 0 broadcasts (7, 8).

    The timeout of all ranks, and of a mesh dimension, is two hours.
    """
    first, second = exchange(2)
    assert first == second
    assert first == {
        "unequal": [[10, 11], [20, 21], [22, 23]],
        "none_on_rank_0": [[0.5, 0.5, 0.5]],
        "flags": [True, True, False],
        "halves": [[1.5], [3.0]],
        "transposed": [[0, 3], [1, 4], [2, 5], [100, 103], [101, 104], [102, 105]],
        "sum": [3.0, 30.0],
        "broadcast": [7, 8],
        "waits": {"all": 7200, "alone": 7200},
    }


def test_collectives_of_one_process_return_their_input() -> None:
    rows = torch.tensor([[1, 2], [3, 4]])
    assert ALONE.is_main
    ALONE.barrier()
    assert ALONE.gather_rows(rows).tolist() == [[1, 2], [3, 4]]
    assert ALONE.sum_(rows) is rows
    assert ALONE.broadcast_(rows).tolist() == [[1, 2], [3, 4]]


def test_group_without_torchrun_has_one_rank() -> None:
    with group("cpu") as members:
        assert (members.rank, members.world, members.device) == (0, 1, torch.device("cpu"))
        assert not torch.distributed.is_initialized()
        assert torch.are_deterministic_algorithms_enabled()


def test_group_disables_tf32() -> None:
    """NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE. torch reads it once, when it creates its context."""
    program = """
from torch.backends import cuda, cudnn
from training.distributed import group

print(cuda.matmul.allow_tf32)
with group("cpu"):
    print(cuda.matmul.allow_tf32, cudnn.allow_tf32)
"""
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


@pytest.mark.parametrize("threads", ["0", "-1", "four", "2.5"])
def test_group_with_invalid_thread_count_raises(monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with pytest.raises(TrainingError, match=rf"OMP_NUM_THREADS is '{threads}'.*\[bad-thread-count\]"), group("cpu"):
        pass


def test_group_with_list_of_threads_uses_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1,3")
    before = torch.get_num_threads()
    try:
        with group("cpu"):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_group_excludes_nvls_unless_nccl_algo_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums are not deterministic (NVIDIA/nccl issue 1497). NCCL compares whole names (tuning.cc, parseList)."""
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with group("cpu"):
        assert os.environ["NCCL_ALGO"] == "Tree"
    monkeypatch.delenv("NCCL_ALGO")
    with group("cpu"):
        assert os.environ["NCCL_ALGO"][0] == "^" and set(os.environ["NCCL_ALGO"][1:].split(",")) == {"NVLS", "NVLSTree"}


def test_group_on_cuda_without_gpu_raises() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TrainingError, match=r"compute\.device.* auto or cpu \[no-gpu\]"), group("cuda"):
        pass


@pytest.mark.parametrize(
    ("devices", "error"),
    [
        (["cpu", "cpu", "cpu", "cpu"], "^$"),
        (["cuda", "cuda", "cuda", "cuda"], "^$"),
        (["cuda", "cuda", "cpu", "cpu"], r" 1 of 2 nodes.* node 1;.*\[gpu-on-some-nodes\]"),
        (["cpu", "cpu", "cuda", "cuda", "cpu", "cpu"], r" 1 of 3 nodes.* node 0, 2;.*\[gpu-on-some-nodes\]"),
    ],
)
def test_check_same_devices_with_mixed_nodes_raises_on_every_rank(devices: list[str], error: str) -> None:
    """The ranks are threads, two on each node."""
    store, world = torch.distributed.HashStore(), len(devices)

    def check(rank: int) -> str:
        try:
            check_same_devices(store, rank, world, world // 2, torch.device(devices[rank]))
        except TrainingError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(world) as ranks:
        messages = list(ranks.map(check, range(world)))
    assert all(re.search(error, message) for message in messages), messages
