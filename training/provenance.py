"""The software and hardware of a job, recorded in its artifact's details so that results can be checked later.

The record has the digest of this package's source, the libraries, and the causes of the last bits (the order of sums): machine,
threads, number of processes. The manifest has the inputs, `recipe.json` the settings, run_state.py seconds and memory.
Fingerprints do not cover the record, because the identity of an artifact does not depend on the machine.
"""

import platform
from pathlib import Path

import torch

from training.contract.identity.software import library_versions, source_digest
from training.contract.store.artifact_kind import Provenance
from training.distributed import Group

_CPUINFO = Path("/proc/cpuinfo")


def provenance(group: Group) -> Provenance:
    """Return the record of this rank. Call this before the work, while the source on disk is the imported one."""
    return Provenance(
        source=source_digest(),
        libraries=library_versions()
        | {"torch": str(torch.__version__)},  # with its build, because kernels depend on it
        platform=platform.platform(),
        device=device_name(group.device),
        threads=torch.get_num_threads(),
        world=group.world,
    )


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the CPU's model name from Linux, or else the CPU's architecture."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
