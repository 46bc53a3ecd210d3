"""Training does not depend on the order of pairs within a batch, or on the number of ranks (micro-batches: test_policy.py).

The tests compare losses and weights over an epoch or more, so that an error of one step grows in the next ones.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.runs import losses, published, settings, told, tune
from tests.training.tiny_inputs import TinyInputs, build_tiny_inputs
from training.data.tokenization.batch_sampler import epoch_order

pytestmark = pytest.mark.slow

TRAIN, BATCH, SEED = 80, 8, 0
ONE_EPOCH = {"max_steps": TRAIN // BATCH, "batch_size": BATCH, "seed": SEED}


def of_one_length(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give all prompts 2 tokens and all responses 4, so that only the order of the data places a pair in its batch."""
    random = np.random.default_rng(1)
    for example in examples:
        example["prompt_length"], prompt = 2, random.integers(64, size=2).tolist()
        for side in ("chosen", "rejected"):
            example[f"{side}_ids"] = prompt + random.integers(64, size=4).tolist()
            example[f"{side}_mask"] = [False] * 2 + [True] * 4
    return examples


def shuffled_within_batches(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reorder the pairs within each batch of the epoch. The batches keep their pairs."""
    random, arranged = np.random.default_rng(2), of_one_length(examples)
    taken = list(arranged)
    for places in np.split(epoch_order(TRAIN, SEED, 0), TRAIN // BATCH):
        for place, source in zip(places, random.permutation(places), strict=True):
            arranged[place] = taken[source]
    return arranged


def inputs(folder: Path, arrange: Any) -> TinyInputs:
    return build_tiny_inputs(folder, train=TRAIN, validation=0, arrange=arrange)


@pytest.mark.parametrize("micro_tokens", [20, 100_000])
def test_policy_with_reordered_batches_has_the_same_losses(tmp_path: Path, micro_tokens: int):
    """In micro-batches of two pairs of 10 tokens, and in one micro-batch."""
    ordered, shuffled = (
        inputs(tmp_path / "ordered", of_one_length),
        inputs(tmp_path / "shuffled", shuffled_within_batches),
    )
    batches = [[w.examples[i]["row"] for i in epoch_order(TRAIN, SEED, 0)[:BATCH]] for w in (ordered, shuffled)]
    assert batches[0] != batches[1] and sorted(batches[0]) == sorted(batches[1])
    jobs = [w.job("policy", settings(**ONE_EPOCH, micro_tokens=micro_tokens)) for w in (ordered, shuffled)]
    fingerprints = {tune(job).fingerprint for job in jobs}
    assert len(fingerprints) == 2, "equal bits: the shuffling did not change the order of sums"
    assert losses(jobs[1]) == pytest.approx(losses(jobs[0]), abs=1e-5)
    for name in ("rewards/margins", "grad_norm"):
        assert [e[name] for e in told(jobs[1])] == pytest.approx([e[name] for e in told(jobs[0])], rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_policy_on_three_ranks_has_the_losses_of_one(tiny_inputs: TinyInputs, forker: Any):
    """Three ranks cannot share eight pairs equally."""
    alone, three = (tiny_inputs.job("policy", settings(), name) for name in ("alone", "three"))
    tune(alone)
    published(three, forker.run(three, 3))
    assert losses(three) == pytest.approx(losses(alone), abs=1e-5)
    assert len(losses(three)) == 12
