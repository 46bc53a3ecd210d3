"""The slots of the pool `gpu`: as many as `concurrent` in engine.yaml says.

With Slurm or Ray the queue is theirs, so that several jobs of a home may wait in it. Dagster keeps the number. If engine.yaml
is removed, Dagster's default applies again: otherwise two runs would use the GPU of this machine at once.
"""

from pathlib import Path

import dagster as dg

from assets.pipeline.graph import GPU_POOL
from training.contract.errors import EngineError
from training.launch.cluster.engine_file import ENGINE_FILE, read_engine

_CURSOR = "pedigree/gpu_slots"


def set_gpu_slots(instance: dg.DagsterInstance, home: Path) -> None:
    """Give the pool `gpu` the slots of engine.yaml. A wrong file changes nothing: a job of the engine reports it."""
    cursors, storage = instance.daemon_cursor_storage, instance.event_log_storage
    ours = cursors.get_cursor_values({_CURSOR}).get(_CURSOR)
    if not (path := home / ENGINE_FILE).exists():
        if ours:
            storage.delete_concurrency_limit(GPU_POOL)
            cursors.set_cursor_values({_CURSOR: ""})
        return
    try:
        slots = read_engine(path).concurrent
    except EngineError:
        return
    limits = {limit.name: limit.limit for limit in storage.get_pool_limits() if not limit.from_default}
    if limits.get(GPU_POOL) != slots:
        storage.set_concurrency_slots(GPU_POOL, slots)
        cursors.set_cursor_values({_CURSOR: str(slots)})
