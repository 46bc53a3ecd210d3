"""The report of an evaluation: one self-contained HTML file without scripts.

Its texts come from data or models, so the template engine escapes all of them. In addition, the page's content policy forbids
scripts and requests.

The evaluation precedes the release, and several recipes may share it. The release later writes recipe, version and decision at
the line `<!-- release -->` (assets/views/report_page.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from jinja2 import Environment
from markupsafe import Markup

from training.contract.config.loss import Loss
from training.contract.system.templates import templates_beside
from training.evaluation.charts import HEIGHT, WIDTH, histogram, length_scatter
from training.evaluation.examples import Sample, WorstPair
from training.evaluation.token_rewards import TokenRewards
from training.scoring.accuracy import Accuracy

_DIGITS = 4
_LEVELS = 9  # of colour, on each side of zero
_OPEN_SAMPLES, _OPEN_PAIRS = 8, 2


@dataclass(frozen=True)
class Report:
    """The content of the page. `policy`, `reference` and `pairs` are fingerprints.

    `model_name` is the registered model of the recipe, or empty. `date` is in UTC. `reference_loss` is the mean loss of a
    policy that equals the reference. `by_length` is the accuracy by the longer response, `by_source` the accuracy by source
    name. `margins` and `length_differences` (chosen minus rejected tokens) have one value per pair.
    """

    policy: str
    reference: str
    pairs: str
    model_name: str
    date: datetime
    loss: Loss
    reference_loss: float
    metrics: Mapping[str, float]
    accuracy: Accuracy
    by_length: Mapping[str, Accuracy]
    by_source: Mapping[str, Accuracy]
    margins: Sequence[float]
    length_differences: Sequence[int]
    samples: Sequence[Sample]
    worst: Sequence[WorstPair]
    rewards: TokenRewards


@dataclass(frozen=True)
class _Figure:
    """A headline figure: its readable name, its value with the unit, and a remark."""

    name: str
    value: str
    note: str


def render(report: Report) -> str:
    """Return the page as HTML."""
    full = report.rewards.full
    return _PAGE.render(
        report=report,
        date=f"{report.date:%Y-%m-%d %H:%M}",
        figures=_headline(report),
        reward_meaning=_reward_meaning(report.loss),
        changed=sum(sample.before != sample.after for sample in report.samples),
        histogram=histogram(report.margins),
        scatter=length_scatter(report.length_differences, report.margins, report.accuracy.prompts),
        worst_rows={pair.row for pair in report.worst},
        numbers=[(name, _number(value)) for name, value in report.metrics.items()],
        level=lambda reward: _level(reward, full),
    )


def render_votes(report: Report, accuracy: float, votes: int) -> str:
    """Return a page without exact figures and texts of held-out pairs. `accuracy`: the mean of that many `votes`."""
    return _VOTES_PAGE.render(
        report=report, date=f"{report.date:%Y-%m-%d %H:%M}", accuracy=f"{accuracy:.2f}", votes=votes
    )


def _headline(report: Report) -> list[_Figure]:
    accuracy, metrics = report.accuracy, report.metrics
    low, high = map(_percent, accuracy.interval)
    prompts = f" with {_number(accuracy.prompts)} prompts" if accuracy.prompts < accuracy.pairs else ""
    right = f"95% interval {low} to {high}. Share of {_number(accuracy.pairs)} pairs{prompts}"
    rewards = [_signed(metrics[f"eval/rewards/{name}"]) for name in ("margins", "chosen", "rejected")]
    more, less = "", ""
    if report.loss.needs_reference:
        more, less = (
            f"{side} 0 if training made it {word} probable." for side, word in (("Above", "more"), ("Below", "less"))
        )
    return [
        _Figure("Accuracy", _percent(accuracy.share), f"{right} whose chosen response has the higher reward."),
        _Figure(
            "Loss",
            _number(metrics["eval/loss"]),
            f"Type {report.loss.type}. A policy equal to the reference has {_number(report.reference_loss)}.",
        ),
        _Figure("Margin", f"{rewards[0]} nats", "Reward of the chosen minus reward of the rejected response."),
        _Figure("Chosen reward", f"{rewards[1]} nats", more),
        _Figure("Rejected reward", f"{rewards[2]} nats", less),
    ]


def _reward_meaning(loss: Loss) -> str:
    beta = f"beta ({loss.beta:g}) times"
    if loss.needs_reference:
        return (
            f"A reward is {beta} the log-ratio: the log-prob under the policy minus the one under the reference model."
        )
    mean = "mean log-prob of a token" if loss.averages_tokens else "log-prob"
    return f"A reward is {beta} the {mean} under the policy, because the loss uses no reference model."


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{_DIGITS}f}"


def _signed(value: float) -> str:
    return f"{value:+,.{_DIGITS}f}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _level(reward: float, full: float) -> Markup:
    """Return the class of a token's colour as an attribute; none for the weakest."""
    level = round(_LEVELS * min(1.0, abs(reward) / full))
    return Markup(f' class="{"p" if reward > 0 else "n"}{level}"') if level else Markup()


def _visible(text: str) -> str:
    """Return the text of a token with a sign at each end of a line, so that its colour can be seen."""
    return text.replace("\n", "↵\n")


def _environment() -> Environment:
    environment = templates_beside(__file__)
    environment.globals.update(
        number=_number,
        signed=_signed,
        percent=_percent,
        visible=_visible,
        width=WIDTH,
        height=HEIGHT,
        open_samples=_OPEN_SAMPLES,
        open_pairs=_OPEN_PAIRS,
        levels=_LEVELS,
    )
    return environment


_ENVIRONMENT = _environment()
_PAGE = _ENVIRONMENT.get_template("report.html.j2")
_VOTES_PAGE = _ENVIRONMENT.get_template("report_votes.html.j2")
