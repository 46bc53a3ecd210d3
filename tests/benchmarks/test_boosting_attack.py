"""The boosting attack works on exact scores, and the figure is written."""

from pathlib import Path

import pytest

from benchmarks.gate import boosting_attack
from benchmarks.gate.boosting_attack import SUBMISSIONS, draw, simulate


def test_only_exact_scores_give_the_attack_a_large_gain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(boosting_attack, "SUBMISSIONS", SUBMISSIONS[:5])
    attacks = simulate(SUBMISSIONS[:5])
    shown = {name: attack.shown[-1].mean for name, attack in attacks.items()}
    assert shown["exact"] > 0.58
    assert shown["ladder"] < 0.56 and shown["votes"] < 0.57
    for attack in attacks.values():
        assert abs(attack.fresh[-1].mean - 0.5) <= 4 * attack.fresh[-1].error
    draw(attacks, tmp_path / "figure.svg")
    assert "random submissions" in (tmp_path / "figure.svg").read_text()
