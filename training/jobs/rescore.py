"""The `proof` job: score a few pairs again, and write the values beside the table's values.

`pedigree verify` runs it with the reference model: both values must agree up to rounding (scoring/reference_check.py). If a
policy is among the inputs, the job scores with that policy, for `pedigree inspect`. The code is the one that made the table;
the batches are others.

`rescored.json` has one row per pair:  {"row", "chosen": {"stored", "live", "allowed"}, "rejected": {...}}, in nats.
"""

import numpy as np
import numpy.typing as npt

from training.contract.config.loss import Loss
from training.contract.errors import UsageError
from training.contract.identity.fingerprint import fingerprint
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.details import RescoredDetails
from training.contract.protocol.settings import RescoreSettings
from training.contract.store.artifact import JobResult, write_json
from training.contract.store.logprob_table import LogProbTable
from training.data.tokenization.pair_dataset import SIDES, Pairs
from training.job_context import JobContext
from training.model.logprobs.self_check import check_exact
from training.parallel.model_specs import InferenceModelSpec
from training.parallel.strategy import load_frozen
from training.scoring.pairs import score_pairs
from training.scoring.reference_check import ROUNDING_NATS, deviations, evenly_spaced

RESULT_FILE = "rescored.json"


def run(context: JobContext[RescoreSettings]) -> JobResult[RescoredDetails]:
    """Score the rows of the settings. Raises UsageError, TrainingError."""
    job, group, events = context.job, context.group, context.events
    pairs = Pairs.open(job.inputs[AssetName.TOKENIZED_PAIRS].folder)
    table = LogProbTable.read(job.inputs[AssetName.REFERENCE_LOGPROBS].folder, len(pairs))
    positions = _find_positions(pairs, job.settings.rows)
    scorer = job.inputs.get(AssetName.POLICY) or job.inputs[AssetName.REFERENCE_MODEL]
    frozen = InferenceModelSpec(scorer, table.dtype, job.inputs.get(AssetName.REFERENCE_MODEL))
    model = load_frozen(frozen, job.compute.parallel, group, events)
    check_exact(model, events)
    events.phase(f"score {len(positions)} pairs with the {scorer.kind.replace('_', ' ')}")
    scored = score_pairs(model, pairs, positions, table, Loss(), group, events)
    difference = deviations(scored, table)
    values = {"stored": difference.stored_I2, "live": difference.live_I2, "allowed": difference.allowed_I2}
    rows = [
        {"row": int(row)}
        | {
            side: {name: float(of_I2[pair, column]) for name, of_I2 in values.items()}
            for column, side in enumerate(SIDES)
        }
        for pair, row in enumerate(pairs.rows[positions])
    ]
    if group.is_main:
        write_json(job.staging / RESULT_FILE, rows)
    details = RescoredDetails(tolerance=ROUNDING_NATS[table.dtype], dtype=table.dtype)
    return JobResult(fingerprint(job.artifact, rows), details)


def _find_positions(pairs: Pairs, rows: int | tuple[int, ...]) -> npt.NDArray[np.int64]:
    if isinstance(rows, int):
        return evenly_spaced(np.arange(len(pairs)), rows)
    positions = np.flatnonzero(np.isin(pairs.rows, list(rows)))
    if len(positions) != len(rows):
        raise UsageError(
            f"only the rows {pairs.rows[positions].tolist()} of {list(rows)} are tokenized pairs; name rows that are not "
            "dropped",
            "row-not-tokenized",
        )
    return positions
