"""The `proof` job: a few pairs scored again, beside their log-probs in the table.

`pedigree verify` runs it with the reference model. Both values must then agree up to rounding (scoring/reference_check.py).
If a policy is among the inputs, the job gives that policy's log-probs instead, for `pedigree inspect`. The code that made the
table scores the pairs, in other batches.

`rescored.json` holds a row a pair:  {"row", "chosen": {"stored", "live", "allowed"}, "rejected": {...}}, in nats.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from training.contract.config.loss import Loss
from training.contract.errors import UsageError
from training.contract.identity.fingerprint import fingerprint
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.store.logprob_table import LogProbTable
from training.contract.store.store import JobResult, write_json
from training.data.tokenization.pair_dataset import SIDES, Pairs
from training.distributed import Group
from training.model.logprobs.self_check import check_exact
from training.parallel.model_specs import InferenceModelSpec
from training.parallel.strategy import load_frozen
from training.scoring.pairs import score_pairs
from training.scoring.reference_check import ROUNDING_NATS, deviations, evenly_spaced

RESULT_FILE = "rescored.json"


def run(job: Job, group: Group, events: EventWriter) -> JobResult:
    """Score `settings["rows"]`, rows by name or a number of them spread over the table. Raises UsageError, TrainingError."""
    pairs = Pairs.open(job.inputs["tokenized_pairs"].folder)
    table = LogProbTable.read(job.inputs["reference_logprobs"].folder, len(pairs))
    positions = _positions(pairs, job.settings["rows"])
    scorer = job.inputs.get("policy") or job.inputs["reference_model"]
    frozen = InferenceModelSpec(scorer, table.dtype, job.inputs.get("reference_model"))
    model = load_frozen(frozen, job.compute.parallel, group, events)
    check_exact(model, events)
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
    return JobResult(fingerprint("proof", rows), {"tolerance": ROUNDING_NATS[table.dtype], "dtype": table.dtype})


def _positions(pairs: Pairs, wanted: Any) -> npt.NDArray[np.int64]:
    if isinstance(wanted, int):
        return evenly_spaced(np.arange(len(pairs)), wanted)
    positions = np.flatnonzero(np.isin(pairs.rows, wanted))
    if len(positions) != len(wanted):
        raise UsageError(f"of the rows {wanted} only {pairs.rows[positions].tolist()} are among the tokenized pairs")
    return positions
