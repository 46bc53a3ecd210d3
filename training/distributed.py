"""The processes that do one job together, as each of them sees the group.

Under torchrun there are `world` processes, connected by gloo on CPUs and by NCCL on GPUs, with one device each. Without
torchrun there is one process, no connection, and the same calls: code that uses a `Group` need not distinguish the two.
Only tensors are exchanged; nothing is pickled.

Results are reproducible bit for bit on the same machine type with the same world size: deterministic algorithms only,
and the number of threads fixed by OMP_NUM_THREADS, since it decides the order of sums.
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

# How long one rank waits for the others: one may have to read, write or hash all weights alone, or to score a batch that the
# others lack. One that dies is noticed at once.
TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class Group:
    """This process (`rank`) among `world`, on `nodes` machines, each with the same number of consecutive ranks.

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
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its sum over the ranks, in place; it is also returned."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def start_sum_(self, tensor: Tensor) -> Callable[[], object]:
        """Start to replace `tensor` by its sum over the ranks; returns a function that waits until that is done."""
        if self.world == 1:
            return lambda: None
        work = dist.all_reduce(tensor, async_op=True)
        wait: Callable[[], object] = work.wait
        return wait

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by that of rank 0, in place; it is also returned."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """The rows of every rank, in rank order, on every rank. Ranks may have unequal numbers of rows, also none."""
        if self.world == 1:
            return tensor
        rows = torch.cat(self._gather(torch.tensor([len(tensor)], device=tensor.device))).tolist()
        # As bytes, since not every backend exchanges every dtype; padded, since all parts must be of one size.
        row_bytes = tensor.new_empty(1, *tensor.shape[1:]).nbytes
        padded = torch.zeros(max(rows) * row_bytes, dtype=torch.uint8, device=tensor.device)
        padded[: tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        parts = zip(rows, self._gather(padded), strict=True)
        return torch.cat([part[: n * row_bytes].view(tensor.dtype).view(n, *tensor.shape[1:]) for n, part in parts])

    def gather_texts(self, text: str) -> list[str]:
        """The text of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [text]
        content = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8).to(self.device)
        everything = self.gather_rows(content).cpu().numpy().tobytes()
        return [part.decode() for part in everything.split(b"\0")[:-1]]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor)
        return parts


ALONE = Group(0, 1, torch.device("cpu"))  # one process, for work on data: torch is not prepared for any other


def mesh_of(ranks: Group, sizes: Mapping[str, int]) -> DeviceMesh:
    """The ranks in dimensions of these names and sizes, the last of consecutive ranks. Collective.

    The groups of a dimension wait for their ranks as all ranks do for each other: with NCCL it would be ten minutes.
    """
    mesh = init_device_mesh(ranks.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:
        _set_pg_timeout(TIMEOUT, mesh[name].get_group())
    return mesh


@contextlib.contextmanager
def group(device: DeviceName) -> Iterator[Group]:
    """Join the processes that torchrun started, or be the only one; `auto` takes a GPU if there is one.

    Raises TrainingError if `cuda` is asked for and there is none for this rank, if `auto` finds GPUs on some machines only, or
    if OMP_NUM_THREADS is no number.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    nodes = world // int(os.environ.get("LOCAL_WORLD_SIZE", world))
    _compute_reproducibly()
    own = _device(device)
    if world > 1:
        store, on_gpu = _store(world), own.type == "cuda"
        if nodes > 1:
            check_same_devices(store, rank, world, nodes, own)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=TIMEOUT,
            device_id=own if on_gpu else None,
        )
    yield Group(rank, world, own, nodes)
    # Not after an exception: closing the connection makes the other ranks fail, maybe before this one has written why.
    if world > 1:
        dist.destroy_process_group()


def _store(world: int) -> dist.Store:
    """Where the ranks find each other: the launcher's file, else torchrun's TCP store (to which any address may connect)."""
    if file := os.environ.get(RENDEZVOUS):
        return dist.FileStore(file, world)
    store: dist.Store = next(dist.rendezvous("env://"))[0]
    store.set_timeout(TIMEOUT)
    return store


def check_same_devices(store: dist.Store, rank: int, world: int, nodes: int, own: torch.device) -> None:
    """Raises TrainingError on every rank where some have a GPU and others none. Collective.

    These would use gloo, those NCCL, and all would wait until the time is up.
    """
    store = dist.PrefixStore("device", store)
    store.set(str(rank), own.type)
    kinds = [store.get(str(other)).decode() for other in range(world)]
    without = sorted({other * nodes // world for other, kind in enumerate(kinds) if kind == "cpu"})
    if 0 < len(without) < nodes:
        raise TrainingError(
            f"`compute.device: auto` finds a GPU on {nodes - len(without)} of {nodes} nodes, and torch sees none on node "
            f"{', '.join(map(str, without))}; make it see one there (`nvidia-smi`, CUDA_VISIBLE_DEVICES), or set "
            "`compute.device: cpu`"
        )


def _device(wanted: DeviceName) -> torch.device:
    local_rank, found = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and found == 0):
        return torch.device("cpu")
    if found == 0:
        raise TrainingError(
            "`compute.device: cuda` needs a GPU, and torch sees none on this machine; set it to auto or cpu"
        )
    if local_rank >= found:
        raise TrainingError(
            f"local rank {local_rank} needs a GPU of its own and this machine shows {found}; "
            f"set `compute.processes_per_node` to at most {found}, or `compute.device: cpu`"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _compute_reproducibly() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Sums that NVSwitch makes, in an order of its own. By itself torch leaves out NVLS alone, not what goes on between nodes.
    os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")
    # NVIDIA's containers allow TF32 by a variable of the environment: products of float32 then keep 10 bits of 23.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)  # which imports torch's compiler
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs 4% of a step
    if threads := os.environ.get("OMP_NUM_THREADS"):
        outermost = threads.partition(",")[0].strip()  # OpenMP takes a list, a number for each level of nested regions
        if not (outermost.isdecimal() and int(outermost)):
            raise TrainingError(f"OMP_NUM_THREADS is {threads!r}; expected a number of threads, such as 4, or unset it")
        torch.set_num_threads(int(outermost))
