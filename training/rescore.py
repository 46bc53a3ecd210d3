"""The `proof` job: a few pairs scored again, beside their log-probs in the table.

`pedigree verify` runs it with the reference model; both must then agree but for rounding (training.proof says by how much).
With a policy among the inputs it gives that policy's log-probs instead, for `pedigree inspect`. Pairs are scored by the code
that made the table; only the batches are others.

`rescored.json` holds a row a pair:  {"row", "chosen": {"stored", "live", "allowed"}, "rejected": {...}}, in nats.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from training.contract.errors import UsageError
from training.contract.events import EventWriter
from training.contract.fingerprint import fingerprint
from training.contract.job import Job
from training.contract.logprob_table import LogProbTable
from training.contract.loss import Loss
from training.contract.store import Made, write_json
from training.data.tokenized import SIDES, Pairs
from training.distributed import Group
from training.model.selfcheck import demand_exact
from training.parallel.choice import load_frozen
from training.parallel.models import FrozenModel
from training.proof import ROUNDING_NATS, deviations, evenly_spaced
from training.scored_pairs import score_pairs

RESULT_FILE = "rescored.json"


def run(job: Job, group: Group, events: EventWriter) -> Made:
    """Score `settings["rows"]`, rows by name or a number of them spread over the table. Raises UsageError, TrainingError."""
    pairs = Pairs.open(job.inputs["tokenized_pairs"].folder)
    table = LogProbTable.read(job.inputs["reference_logprobs"].folder, len(pairs))
    positions = _positions(pairs, job.settings["rows"])
    scorer = job.inputs.get("policy") or job.inputs["reference_model"]
    frozen = FrozenModel(scorer, table.dtype, job.inputs.get("reference_model"))
    model = load_frozen(frozen, job.compute.parallel, group, events)
    demand_exact(model, events)
    events.phase(f"score {len(positions)} pairs with the {scorer.kind.replace('_', ' ')}")
    scored = score_pairs(model, pairs, positions, table, Loss(), group, events)
    found = deviations(scored, table)
    values = {"stored": found.stored_I2, "live": found.live_I2, "allowed": found.allowed_I2}
    rows: list[dict[str, Any]] = [{"row": int(row)} for row in pairs.rows[positions]]
    for at, row in enumerate(rows):
        for number, side in enumerate(SIDES):
            row[side] = {name: float(of_pairs[at, number]) for name, of_pairs in values.items()}
    if group.is_main:
        write_json(job.staging / RESULT_FILE, rows)
    return Made(fingerprint("proof", rows), {"tolerance": ROUNDING_NATS[table.dtype], "dtype": table.dtype})


def _positions(pairs: Pairs, wanted: Any) -> npt.NDArray[np.int64]:
    if isinstance(wanted, int):
        return evenly_spaced(np.arange(len(pairs)), wanted)
    positions = np.flatnonzero(np.isin(pairs.rows, wanted))
    if len(positions) != len(wanted):
        raise UsageError(f"of the rows {wanted} only {pairs.rows[positions].tolist()} are among the tokenized pairs")
    return positions
