"""The collectives of two real ranks, and of one process alone, against numbers worked out by hand."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import training
from tests.training.workshop import Workshop
from training.contract.config.recipe import Compute
from training.contract.errors import TrainingError
from training.contract.protocol.job import Job
from training.distributed import ALONE, check_same_devices, group
from training.launch.launcher import run_job
from training.launch.local import LocalLauncher

PROGRAMS = Path(__file__).parent / "launch" / "programs"


@pytest.fixture
def exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What each of the ranks got when they exchanged what `ranked_program` says."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROGRAMS), str(Path(training.__file__).parents[1])]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(ranks: int) -> list[dict[str, Any]]:
        job: Job = Workshop(tmp_path).job("policy", "policy", {}, {"act": "exchange"})
        job = job.model_copy(update={"compute": Compute(processes_per_node=ranks, device="cpu")})
        run_job(LocalLauncher("ranked_program"), job, lambda event: None)
        return [json.loads((job.folder / f"got-{rank}.json").read_text()) for rank in range(ranks)]

    return run


@pytest.mark.slow
def test_two_ranks(exchange: Callable[..., Any]) -> None:
    """Rank r gives, with k = r + 1: k rows, r rows, k flags; sums of (1, 10) and 2 x (1, 10); rank 0's (7, 8).

    All ranks, and those of a dimension of a mesh, wait two hours for each other."""
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


def test_one_process_has_the_same_calls() -> None:
    rows = torch.tensor([[1, 2], [3, 4]])
    assert ALONE.is_main
    ALONE.barrier()
    assert ALONE.gather_rows(rows).tolist() == [[1, 2], [3, 4]]
    assert ALONE.sum_(rows) is rows
    assert ALONE.broadcast_(rows).tolist() == [[1, 2], [3, 4]]


def test_a_group_without_torchrun_is_this_process() -> None:
    with group("cpu") as members:
        assert (members.rank, members.world, members.device) == (0, 1, torch.device("cpu"))
        assert not torch.distributed.is_initialized()
        assert torch.are_deterministic_algorithms_enabled()


def test_float32_is_never_tf32() -> None:
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which NVIDIA's containers set, is read once, as torch's context is made."""
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
def test_a_number_of_threads_that_is_none_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with pytest.raises(TrainingError, match=rf"OMP_NUM_THREADS is '{threads}'; expected a number"), group("cpu"):
        pass


def test_of_the_threads_of_nested_regions_the_outermost_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1,3")
    before = torch.get_num_threads()
    try:
        with group("cpu"):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_no_switch_adds_up_gradients_unless_somebody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL compares whole names (tuning.cc, parseList); its authors call such sums not deterministic (NVIDIA/nccl, 1497)."""
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with group("cpu"):
        assert os.environ["NCCL_ALGO"] == "Tree"
    monkeypatch.delenv("NCCL_ALGO")
    with group("cpu"):
        assert os.environ["NCCL_ALGO"][0] == "^" and set(os.environ["NCCL_ALGO"][1:].split(",")) == {"NVLS", "NVLSTree"}


def test_a_missing_gpu_is_refused_with_the_way_out() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TrainingError, match="torch sees none on this machine; set it to auto or cpu"), group("cuda"):
        pass


@pytest.mark.parametrize(
    ("devices", "fault"),
    [
        (["cpu", "cpu", "cpu", "cpu"], "nothing"),
        (["cuda", "cuda", "cuda", "cuda"], "nothing"),
        (["cuda", "cuda", "cpu", "cpu"], "finds a GPU on 1 of 2 nodes, and torch sees none on node 1;"),
        (
            ["cpu", "cpu", "cuda", "cuda", "cpu", "cpu"],
            "finds a GPU on 1 of 3 nodes, and torch sees none on node 0, 2;",
        ),
    ],
)
def test_nodes_with_a_gpu_and_without_do_not_wait_for_each_other(devices: list[str], fault: str) -> None:
    """Ranks as threads, two on each node: each is told."""
    store, world = torch.distributed.HashStore(), len(devices)

    def told(rank: int) -> str:
        try:
            check_same_devices(store, rank, world, world // 2, torch.device(devices[rank]))
        except TrainingError as error:
            return str(error)
        return "nothing"

    with ThreadPoolExecutor(world) as ranks:
        said = list(ranks.map(told, range(world)))
    assert all(fault in words for words in said), said
