"""The group of processes that run one job.

Under torchrun there are `world` processes with one device each, connected by gloo on CPUs and by NCCL on GPUs. Without torchrun
there is one process without connections. The calls are the same, so code that uses a `Group` does not distinguish the two.
Ranks exchange tensors only; nothing is pickled.

Results are reproducible bit for bit on the same machine type with the same world size. Algorithms are deterministic, and
OMP_NUM_THREADS fixes the number of threads, because the order of sums depends on it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from training.contract.config.recipe import DeviceName
from training.contract.errors import TrainingError
from training.contract.protocol.job import RENDEZVOUS

# The longest wait for other ranks. One rank may read, write or hash all weights alone, or score one batch more than the others.
# The end of a rank is noticed at once.
TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class Group:
    """One process (`rank`) of `world`, on `nodes` machines with the same number of consecutive ranks.

    Every method is collective: all ranks call it, in the same order.
    """

    rank: int
    world: int
    device: torch.device
    nodes: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank calls this."""
        if self.world > 1:
            dist.barrier()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its sum over the ranks, in place. Return it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def start_sum_(self, tensor: Tensor) -> Callable[[], object]:
        """Start to replace `tensor` by its sum over the ranks. Return a function that waits for the sum."""
        if self.world == 1:
            return lambda: None
        work = dist.all_reduce(tensor, async_op=True)
        wait: Callable[[], object] = work.wait
        return wait

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by the tensor of rank 0, in place. Return it."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks, in rank order. Ranks may have different numbers of rows, also zero."""
        if self.world == 1:
            return tensor
        rows = torch.cat(self._gather(torch.tensor([len(tensor)], device=tensor.device))).tolist()
        # As bytes, because some backends lack some dtypes; padded, because all parts must have one size.
        row_bytes = tensor.new_empty(1, *tensor.shape[1:]).nbytes
        padded = torch.zeros(max(rows) * row_bytes, dtype=torch.uint8, device=tensor.device)
        padded[: tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        parts = zip(rows, self._gather(padded), strict=True)
        return torch.cat([part[: n * row_bytes].view(tensor.dtype).view(n, *tensor.shape[1:]) for n, part in parts])

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order."""
        if self.world == 1:
            return [text]
        content = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8).to(self.device)
        all_texts = self.gather_rows(content).cpu().numpy().tobytes()
        return [part.decode() for part in all_texts.split(b"\0")[:-1]]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor)
        return parts


ALONE = Group(0, 1, torch.device("cpu"))  # for jobs on data only: `group` has not configured torch


def mesh_of(ranks: Group, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return a mesh of the ranks with dimensions of these names and sizes; the last has consecutive ranks. Collective.

    The groups of a dimension get the timeout `TIMEOUT`: the default of NCCL is ten minutes.
    """
    mesh = init_device_mesh(ranks.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:
        _set_pg_timeout(TIMEOUT, mesh[name].get_group())
    return mesh


@contextlib.contextmanager
def group(device: DeviceName) -> Iterator[Group]:
    """Join the processes that torchrun started, or form a group of one. `auto` takes a GPU if there is one.

    Raises TrainingError if `cuda` finds no GPU for this rank, if `auto` finds GPUs on some machines only, or if
    OMP_NUM_THREADS is not a number.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    nodes = world // int(os.environ.get("LOCAL_WORLD_SIZE", world))
    _compute_reproducibly()
    local_device = _select_device(device)
    if world > 1:
        store, on_gpu = _connect_store(world), local_device.type == "cuda"
        if nodes > 1:
            check_same_devices(store, rank, world, nodes, local_device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=TIMEOUT,
            device_id=local_device if on_gpu else None,
        )
    yield Group(rank, world, local_device, nodes)
    # Not after an exception: a closed connection makes the other ranks fail, maybe before this one has written its error.
    if world > 1:
        dist.destroy_process_group()


def _connect_store(world: int) -> dist.Store:
    """Return the rendezvous store: the launcher's file, or else torchrun's TCP store, to which any address may connect."""
    if file := os.environ.get(RENDEZVOUS):
        return dist.FileStore(file, world)
    store: dist.Store = next(dist.rendezvous("env://"))[0]
    store.set_timeout(TIMEOUT)
    return store


def check_same_devices(store: dist.Store, rank: int, world: int, nodes: int, device: torch.device) -> None:
    """Raise TrainingError on every rank if only some nodes have a GPU. Collective.

    Otherwise some ranks would use gloo and others NCCL, and all would wait until the timeout.
    """
    store = dist.PrefixStore("device", store)
    store.set(str(rank), device.type)
    types = [store.get(str(other)).decode() for other in range(world)]
    without = sorted({other * nodes // world for other, device_type in enumerate(types) if device_type == "cpu"})
    if 0 < len(without) < nodes:
        raise TrainingError(
            f"`compute.device: auto` finds a GPU on {nodes - len(without)} of {nodes} nodes, but torch sees no GPU on node "
            f"{', '.join(map(str, without))}; make one visible there (`nvidia-smi`, CUDA_VISIBLE_DEVICES), or set "
            "`compute.device: cpu`",
            "gpu-on-some-nodes",
        )


def _select_device(setting: DeviceName) -> torch.device:
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if setting == "cpu" or (setting == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise TrainingError(
            "`compute.device: cuda` needs a GPU, but torch sees 0 on this machine; set it to auto or cpu", "no-gpu"
        )
    if local_rank >= gpus:
        raise TrainingError(
            f"local rank {local_rank} needs its own GPU, but torch sees {gpus} on this machine; "
            f"set `compute.processes_per_node` to at most {gpus}, or `compute.device: cpu`",
            "too-few-gpus",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _compute_reproducibly() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # NVSwitch sums in its own order. torch itself excludes only NVLS, not NVLSTree, which sums between nodes.
    os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")
    # NVIDIA's containers enable TF32 by an environment variable: float32 products then keep 10 of 23 bits.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)  # this imports torch's compiler
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs 4% of a step
    if threads := os.environ.get("OMP_NUM_THREADS"):
        outermost = threads.partition(",")[0].strip()  # OpenMP accepts a list: one number per nesting level
        if not (outermost.isdecimal() and int(outermost)):
            raise TrainingError(
                f"OMP_NUM_THREADS is {threads!r}; expected a number of threads, such as 4, or unset it",
                "bad-thread-count",
            )
        torch.set_num_threads(int(outermost))
