"""The boosting attack on a public score: `python -m benchmarks.gate.boosting_attack --figure PATH`.

Submit policies that rank the held-out pairs at random. Keep those whose answers look better than chance, and submit their
majority vote. If the answers are exact, its score rises far above the truth, 0.5 (Blum and Hardt 2015, "The Ladder"). Three
answers are compared:

    exact    the share of rightly ranked pairs; kept: above 0.5
    ladder   the best share so far; it changes if a policy is better by more than one standard error; kept: if it changes
    votes    the mean of 100 votes, each of which ranks one random pair: 0 or 1 (Blanc 2023, arXiv 2302.08661); kept: above 0.5

The gate `ladder` decides by the second. The third answer is no part of the gate. Figures are means over ATTACKS attacks, with
their standard errors.

Legend: A attacks, N held-out pairs, then as many fresh ones.
"""

import argparse
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from benchmarks.gate.estimate import Estimate
from benchmarks.setting import table
from model_registry.gate.betting import Floats

ATTACKS, PAIRS, VOTES = 100, 500, 100
SUBMISSIONS = (1, 3, 10, 30, 100, 300, 1000, 3000)
CHANCE = 0.5

Ranks = npt.NDArray[np.int8]  # 1: the pair is ranked rightly, -1: wrongly
Kept = npt.NDArray[np.bool_]
_DESCRIPTION = """ <title>The boosting attack on a public score</title>
 <desc>Score of the majority vote over the number of random submissions. The exact score rises furthest, the mean of votes less,
  the ladder least. The truth on fresh pairs stays at one half.</desc>"""


def share_right(ranks_AN: Ranks) -> Floats:
    """Return the share of rightly ranked pairs for each attack."""
    shares: Floats = (ranks_AN > 0).mean(axis=1)
    return shares


@dataclass
class Exact:
    """Answer with the exact share of rightly ranked held-out pairs."""

    name = "exact"

    def submit(self, ranks_AN: Ranks) -> Kept:
        """Return which submissions the attackers keep."""
        return self.score(ranks_AN) > CHANCE

    def score(self, ranks_AN: Ranks) -> Floats:
        """Return the public scores of these policies, without submitting them."""
        return share_right(ranks_AN)


@dataclass
class Votes:
    """Answer with the mean of votes. Each draws one pair, so their sum is binomial."""

    random: np.random.Generator
    name = "votes"

    def submit(self, ranks_AN: Ranks) -> Kept:
        return self.score(ranks_AN) > CHANCE

    def score(self, ranks_AN: Ranks) -> Floats:
        return self.random.binomial(VOTES, share_right(ranks_AN)) / VOTES


@dataclass
class Ladder:
    """Answer with the score of the best policy. A better one must beat it by more than one paired standard error.

    The shares are multiples of 1/N, so rounding to these changes nothing.
    """

    best_AN: Ranks | None = None
    name = "ladder"

    def submit(self, ranks_AN: Ranks) -> Kept:
        if self.best_AN is None:
            self.best_AN = ranks_AN.copy()
            return share_right(ranks_AN) > CHANCE
        kept = self._beats_best(ranks_AN)
        self.best_AN[kept] = ranks_AN[kept]
        return kept

    def score(self, ranks_AN: Ranks) -> Floats:
        if self.best_AN is None:
            return share_right(ranks_AN)
        return np.where(self._beats_best(ranks_AN), share_right(ranks_AN), share_right(self.best_AN))

    def _beats_best(self, ranks_AN: Ranks) -> Kept:
        gains_AN = (ranks_AN - self.best_AN) / 2
        beats: Kept = gains_AN.mean(axis=1) > gains_AN.std(axis=1, ddof=1) / math.sqrt(PAIRS)
        return beats


Board = Exact | Ladder | Votes


@dataclass
class Attack:
    """The attackers of one board. `sums`: of the kept ranks on held-out and fresh pairs, and a coin for ties."""

    board: Board
    sums: Floats
    shown: list[Estimate] = field(default_factory=list)
    held_out: list[Estimate] = field(default_factory=list)
    fresh: list[Estimate] = field(default_factory=list)

    def submit(self, ranks: Ranks) -> None:
        self.sums += ranks * self.board.submit(ranks[:, :PAIRS])[:, None]

    def measure(self) -> None:
        """Take the score that the board shows for the majority vote, and its true shares."""
        majority = np.sign(self.sums).astype(np.int8)
        self.shown.append(Estimate.of(self.board.score(majority[:, :PAIRS])))
        self.held_out.append(Estimate.of(share_right(majority[:, :PAIRS])))
        self.fresh.append(Estimate.of(share_right(majority[:, PAIRS:])))


def simulate(submissions: tuple[int, ...] = SUBMISSIONS) -> dict[str, Attack]:
    """Attack each board with the same random policies. Measure after these numbers of submissions."""
    random = np.random.default_rng(0)
    coins = random.choice((-0.5, 0.5), size=(ATTACKS, 2 * PAIRS))
    attacks = [Attack(board, coins.copy()) for board in (Exact(), Ladder(), Votes(random))]
    for count in range(1, submissions[-1] + 1):
        ranks: Ranks = 2 * random.integers(0, 2, size=(ATTACKS, 2 * PAIRS), dtype=np.int8) - 1
        for attack in attacks:
            attack.submit(ranks)
            if count in submissions:
                attack.measure()
    return {attack.board.name: attack for attack in attacks}


def draw(attacks: dict[str, Attack], path: Path) -> None:
    """Draw the scores that the boards show for the majority votes, and the truth of the one after exact answers."""
    labels = {"exact": "exact score", "votes": f"mean of {VOTES} votes", "ladder": "ladder"}
    with matplotlib.rc_context({"svg.hashsalt": "boosting", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for (name, label), style in zip(labels.items(), ("-o", "-s", "-^"), strict=True):
            axes.plot(SUBMISSIONS, [shown.mean for shown in attacks[name].shown], style, label=label, markersize=4)
        fresh = [fresh.mean for fresh in attacks["exact"].fresh]
        axes.plot(SUBMISSIONS, fresh, "--", color="gray", label="truth, on fresh pairs")
        axes.set(xscale="log", xlabel="random submissions", ylabel="score of their majority vote")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    if path.suffix == ".svg":
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(" <metadata>", f"{_DESCRIPTION}\n <metadata>", 1), encoding="utf-8")


def rows(attacks: dict[str, Attack]) -> list[list[str]]:
    found = [["submissions", *(f"{name}: shown, held-out, fresh" for name in attacks)]]
    for at, count in enumerate(SUBMISSIONS):
        shown = [(attack.shown[at], attack.held_out[at], attack.fresh[at]) for attack in attacks.values()]
        found.append([f"{count:,}", *(", ".join(f"{estimate:.3f}" for estimate in each) for each in shown)])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="where to write the figure, as .svg or .png")
    figure = parser.parse_args().figure
    attacks = simulate()
    sys.stdout.write(f"{ATTACKS} attacks on {PAIRS} held-out pairs\n\n{table(rows(attacks))}")
    if figure is not None:
        draw(attacks, figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
