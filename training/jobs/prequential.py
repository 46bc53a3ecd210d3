"""The `prequential` job: test, then train. Policies score the pairs that arrived after their training.

1. For each policy, find the fresh pairs. Their prompts and their sequences are missing from the training data and the held-out
   pairs of the policy and of its ancestors. Prompts are compared by messages. Sequences are compared by tokens, because a
   template may write the same tokens for two messages.
2. Score their sequences with the policy and its reference model, through the log-prob cache: each sequence once, ever. So a
   killed job loses half a minute, and new pairs cost what they cost.
3. On rank 0, compute the losses with the policy's own loss, and write one row for each policy and pair.

The test of a model on data before it is trained on them is called prequential (Dawid 1984, "Present position and potential
developments"; Gama et al. 2013, "On evaluating stream learning algorithms").

Legend: P pairs, V fresh ones, K bytes of a key, 2 responses (chosen, rejected).
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from training.contract.errors import TrainingError
from training.contract.files.prompt_digests import fresh_prompts
from training.contract.identity.fingerprint import KEY_BYTES, fingerprint, short
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.details import PrequentialDetails, ScoredPolicy
from training.contract.protocol.job import Input
from training.contract.protocol.prequential import SCORES_FILE, PolicyToScore, PrequentialSettings
from training.contract.store.artifact import JobResult
from training.contract.store.logprob_cache import LogprobCache, scoring_rule
from training.contract.store.store import Store
from training.data.tokenization.pair_dataset import SIDES, Pairs, by_pair
from training.job_context import JobContext
from training.losses.inputs import PairLogProbs
from training.losses.preference import preference_loss
from training.model.backbone import text_config
from training.model.logprobs.self_check import check_exact
from training.parallel.model_specs import InferenceModelSpec
from training.parallel.strategy import load_frozen
from training.scoring.cached_sequences import DistinctSequences, find_missing, score_missing
from training.scoring.pairs import ScoredPairs

Columns = dict[str, list[object]]


@dataclass(frozen=True)
class _Model:
    """A model that scores pairs at V positions: a policy or its reference model."""

    spec: InferenceModelSpec
    cache: LogprobCache
    pairs: Pairs
    positions_V: npt.NDArray[np.int64]

    def score(self, context: JobContext[PrequentialSettings]) -> tuple[int, int]:
        """Score the sequences that the cache lacks. Return the counts of known and of scored sequences. Collective."""
        group, events, pairs = context.group, context.events, self.pairs
        sequences = DistinctSequences.of(pairs)
        needed_M = np.unique(by_pair(sequences.sequence_2P)[self.positions_V])
        missing_M = np.intersect1d(needed_M, find_missing(self.cache, sequences, group))
        if len(missing_M):
            model = load_frozen(self.spec, context.job.compute.parallel, group, events)
            pairs.check_known_tokens(text_config(model).vocab_size)
            check_exact(model, events)
            score_missing(model, sequences, missing_M, self.cache, group, events)
            del model
            gc.collect()  # the model is in reference cycles, and the next one needs the memory
        return len(needed_M) - len(missing_M), len(missing_M)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and token counts, V x 2. Raise TrainingError if one is missing, or has another token count."""
        keys_2VK, rows = self._keys_2VK, np.tile(self.pairs.rows[self.positions_V], 2)
        found = self.cache.lookup(keys_2VK)
        expected_2V = np.concatenate([self.pairs.trained_lengths(side)[self.positions_V] for side in SIDES])
        if len(wrong := np.flatnonzero(found.counts_Q != expected_2V)):
            first = wrong[0]
            raise TrainingError(
                f"{len(wrong)} of {len(keys_2VK)} responses lack log-probs after scoring, first of row {rows[first]} "
                f"({found.counts_Q[first]} tokens, expected {expected_2V[first]}); the store lost cache shards during the "
                "job: run again",
                "cache-shards-lost",
            )
        return torch.from_numpy(by_pair(found.sums_Q)), torch.from_numpy(by_pair(found.counts_Q))

    def tails(self, common_V: torch.Tensor) -> torch.Tensor:
        """Return the parts of the log-probs after `common_V` tokens, V x 2."""
        starts_2V = np.tile(common_V.numpy().astype(np.int64), 2)
        return torch.from_numpy(by_pair(self.cache.tail_sums(self._keys_2VK, starts_2V)))

    @property
    def _keys_2VK(self) -> npt.NDArray[np.uint8]:
        return np.concatenate([self.pairs.keys(side)[self.positions_V] for side in SIDES])


def run(context: JobContext[PrequentialSettings]) -> JobResult[PrequentialDetails]:
    settings = context.settings
    columns: Columns = {}
    policies = []
    for policy in settings.policies:
        if (found := _score_policy(context, policy)) is not None:
            policies.append(found[0])
            for name, values in found[1].items():
                columns.setdefault(name, []).extend(values)
    if not context.group.is_main:
        return JobResult()
    pq.write_table(pa.table(columns), context.job.staging / SCORES_FILE)
    identity = fingerprint(AssetName.PREQUENTIAL_SCORES.value, columns)
    return JobResult(identity, PrequentialDetails(champion=settings.champion, policies=tuple(policies)))


def _score_policy(
    context: JobContext[PrequentialSettings], policy: PolicyToScore
) -> tuple[ScoredPolicy, Columns] | None:
    """Return the counts and means of a policy, and its rows; None on other ranks than 0. Collective."""
    job, dtype = context.job, context.settings.dtype
    weights, reference = job.inputs[policy.policy], job.inputs[policy.reference]
    pairs = Pairs.open(job.inputs[policy.pairs].folder)
    seen = [job.inputs[name].folder for name in policy.seen_rows]
    prompts = fresh_prompts(job.inputs[AssetName.RAW_PREFERENCES].folder, seen, context.settings.split)
    positions_V = _fresh_positions(pairs, prompts, [job.inputs[name] for name in policy.seen_pairs])
    context.events.phase(f"score {len(positions_V):,} fresh pairs with the policy {short(weights.fingerprint)}")

    def model(spec: InferenceModelSpec) -> _Model:
        rule = scoring_rule(spec.model.fingerprint, dtype)
        cache = LogprobCache(Store(job.store), rule, context.events.note, context.settings.software)
        return _Model(spec, cache, pairs, positions_V)

    tested, referred = (
        model(InferenceModelSpec(weights, dtype, reference)),
        model(InferenceModelSpec(reference, dtype)),
    )
    hits, scored = tested.score(context)
    referred.score(context)
    if not context.group.is_main:
        return None
    digests = [prompts[row].hex() for row in pairs.rows[positions_V].tolist()]
    found = _compute_losses(policy, tested, referred)
    counts = ScoredPolicy(
        policy=weights.fingerprint,
        pairs=len(positions_V),
        prompts=len(set(digests)),
        finite=int(torch.isfinite(found.outcome.losses_B).sum()),
        hits=hits,
        scored=scored,
        loss=float(found.outcome.losses_B.mean()),
        accuracy=float(found.outcome.accuracies_B.double().mean()),
    )
    return counts, {**found.columns(), "policy": [weights.fingerprint] * len(digests), "prompt": list(digests)}


def _compute_losses(policy: PolicyToScore, tested: _Model, referred: _Model) -> ScoredPairs:
    (policy_V2, tokens_V2), (reference_V2, _) = tested.read(), referred.read()
    logprobs = PairLogProbs(policy_V2, reference_V2, tokens_V2)
    if policy.loss.needs_token_logprobs:
        common_V = tokens_V2.min(dim=1).values
        logprobs = PairLogProbs(policy_V2, reference_V2, tokens_V2, tested.tails(common_V), referred.tails(common_V))
    return ScoredPairs(tested.pairs, tested.positions_V, logprobs, preference_loss(policy.loss, logprobs))


def _fresh_positions(pairs: Pairs, prompts: dict[int, bytes], seen: list[Input]) -> npt.NDArray[np.int64]:
    """Return the positions of the pairs with fresh `prompts` (by row) and without a sequence of the pairs `seen`."""
    is_fresh_P = np.isin(pairs.rows, list(prompts))
    for tokenized in seen:
        known = np.concatenate(list(_keys(Pairs.open(tokenized.folder))))
        for keys_P in _keys(pairs):
            is_fresh_P &= ~np.isin(keys_P, known)
    return np.flatnonzero(is_fresh_P)


def _keys(pairs: Pairs) -> Iterator[npt.NDArray[np.bytes_]]:
    """Yield the keys of all chosen, then of all rejected sequences, each as one value."""
    for side in SIDES:
        yield pairs.keys(side).view(np.dtype(f"S{KEY_BYTES}"))[:, 0]
