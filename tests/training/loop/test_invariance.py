"""What must not matter: the order of pairs within a batch, and how many ranks there are (and micro-batches: test_policy.py).

Losses and weights are compared over an epoch or more, so that an error of one step would grow in the next ones.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.runs import losses, published, settings, told, tune
from tests.training.worlds import TinyWorld, build_world
from training.data.tokenization.batch_sampler import epoch_order

TRAIN, BATCH, SEED = 80, 8, 0
ONE_EPOCH = {"max_steps": TRAIN // BATCH, "batch_size": BATCH, "seed": SEED}


def of_one_length(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prompts of 2 tokens and responses of 4: among equals nothing but the order of the data decides who stands where."""
    random = np.random.default_rng(1)
    for example in examples:
        example["prompt_length"], prompt = 2, random.integers(64, size=2).tolist()
        for side in ("chosen", "rejected"):
            example[f"{side}_ids"] = prompt + random.integers(64, size=4).tolist()
            example[f"{side}_mask"] = [False] * 2 + [True] * 4
    return examples


def shuffled_within_batches(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Other pairs at the places of a batch's pairs, but for whole the same ones."""
    random, arranged = np.random.default_rng(2), of_one_length(examples)
    taken = list(arranged)
    for places in np.split(epoch_order(TRAIN, SEED, 0), TRAIN // BATCH):
        for place, source in zip(places, random.permutation(places), strict=True):
            arranged[place] = taken[source]
    return arranged


def world(folder: Path, arrange: Any) -> TinyWorld:
    return build_world(folder, train=TRAIN, validation=0, arrange=arrange)


@pytest.mark.parametrize("micro_tokens", [20, 100_000])
def test_the_order_of_pairs_within_a_batch_changes_nothing(tmp_path: Path, micro_tokens: int):
    """In micro-batches of two pairs of 10 tokens, and in one."""
    given, other = world(tmp_path / "given", of_one_length), world(tmp_path / "other", shuffled_within_batches)
    batches = [[w.examples[i]["row"] for i in epoch_order(TRAIN, SEED, 0)[:BATCH]] for w in (given, other)]
    assert batches[0] != batches[1] and sorted(batches[0]) == sorted(batches[1])
    jobs = [w.job("policy", settings(**ONE_EPOCH, micro_tokens=micro_tokens)) for w in (given, other)]
    fingerprints = {tune(job).fingerprint for job in jobs}
    assert len(fingerprints) == 2, "not a bit differs: the order has not changed what is added to what"
    assert losses(jobs[1]) == pytest.approx(losses(jobs[0]), abs=1e-5)
    for name in ("rewards/margins", "grad_norm"):
        assert [e[name] for e in told(jobs[1])] == pytest.approx([e[name] for e in told(jobs[0])], rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_three_processes_are_one(tiny_world: TinyWorld, forker: Any):
    """Eight pairs do not divide by three, so no two ranks' shares are alike."""
    alone, three = (tiny_world.job("policy", settings(), name) for name in ("alone", "three"))
    tune(alone)
    published(three, forker.run(three, 3))
    assert losses(three) == pytest.approx(losses(alone), abs=1e-5)
    assert len(losses(three)) == 12
