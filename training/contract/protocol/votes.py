"""Figures of held-out pairs from votes, and a bound on what they reveal.

Exact figures reveal the held-out pairs bit by bit: who tunes a recipe on them fits these pairs. A vote reveals little. It draws
one of n pairs uniformly and answers 0 or 1: 1 with the probability s, the score of the pair in [0, 1]. A figure is the mean of
VOTES votes. Its expectation is the exact mean, its standard error at most 0.05.

    Blanc 2023, "Subsampling suffices for adaptive data analysis" (arXiv 2302.08661)

A vote looks at w = 1 pair and has r = 2 answers. It adds at most 4 * w * (r - 1) / n = 4 / n nats to the mutual information I
between all answers and the pairs. This holds for any choices of the user between the votes. The expected bias of a later figure
in [0, 1] is at most sqrt(I / (2 * n)).

The random numbers follow from the key of the evaluation's derivation. So removing and recomputing an evaluation never draws
again.

Legend: V scores, one per pair.
"""

import hashlib
import math

import numpy as np
import numpy.typing as npt

VOTES = 100  # of one figure
_PAIRS_OF_A_VOTE, _ANSWERS = 1, 2
ACCURACY_VOTES, WIN_VOTES = "eval/votes/accuracy", "eval/votes/win"


def vote(scores_V: npt.ArrayLike, figure: str, key: str) -> float:
    """Return the mean of VOTES votes about at least one score.

    `figure` and `key`, the evaluation's, decide the random numbers. A score that is not finite answers 0.
    """
    scores = np.nan_to_num(np.asarray(scores_V, dtype=np.float64), nan=0.0)
    assert scores.ndim == 1 and len(scores), f"scores of shape {scores.shape}, expected [V] with V > 0"
    assert bool(((scores >= 0) & (scores <= 1)).all()), "a score is outside [0, 1]"
    seed = int.from_bytes(hashlib.sha256(f"{figure} of {key}".encode()).digest(), "big")
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(scores), size=VOTES)
    return float(np.mean(generator.random(VOTES) < scores[drawn]))


def nats_of_a_figure(pairs: int) -> float:
    """Return how many nats VOTES votes about `pairs` independent pairs reveal at most."""
    return VOTES * 4 * _PAIRS_OF_A_VOTE * (_ANSWERS - 1) / pairs


def bias_bound(nats: float, pairs: int) -> float:
    """Return the largest expected bias of a figure in [0, 1] on `pairs` pairs of which `nats` are revealed."""
    return math.sqrt(nats / (2 * pairs))
