"""The report of an evaluation: one self-contained HTML file without scripts.

Its texts come from data or models, so the template engine escapes all of them. In addition, the page's content policy forbids
scripts and requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jinja2 import Environment, StrictUndefined

from training.scoring.accuracy import Accuracy

_BINS = 40
_PLOT_WIDTH, _PLOT_HEIGHT = 720, 180
_DIGITS = 4


@dataclass(frozen=True)
class Sample:
    """A held-out prompt with the answers of the reference model (before) and the policy (after), and the chosen response."""

    row: int
    prompt: str
    before: str
    after: str
    chosen: str

    def abridged(self, most: int) -> "Sample":
        """Return the sample with at most `most` characters per text: the end of the prompt, the beginning of the answers."""
        return Sample(self.row, self.prompt[-most:], self.before[:most], self.after[:most], self.chosen[:most])


@dataclass(frozen=True)
class WorstPair:
    row: int
    loss: float
    margin: float
    prompt: str
    chosen: str
    rejected: str

    def abridged(self, most: int) -> "WorstPair":
        """Return the pair with at most `most` characters per text, cut like a sample."""
        prompt, chosen, rejected = self.prompt[-most:], self.chosen[:most], self.rejected[:most]
        return replace(self, prompt=prompt, chosen=chosen, rejected=rejected)


@dataclass(frozen=True)
class Report:
    """The content of the page. `policy`, `reference` and `pairs` are fingerprints.

    `by_length` is the accuracy by the longer response, `by_source` the accuracy by source name.
    """

    policy: str
    reference: str
    pairs: str
    metrics: Mapping[str, float]
    accuracy: Accuracy
    by_length: Mapping[str, Accuracy]
    by_source: Mapping[str, Accuracy]
    margins: Sequence[float]
    samples: Sequence[Sample]
    worst: Sequence[WorstPair]


@dataclass(frozen=True)
class _Bar:
    left: float
    top: float
    width: float
    height: float
    positive: bool
    title: str


@dataclass(frozen=True)
class _Histogram:
    """Bars in plot coordinates, and the ends of the horizontal axis. `most` is the count of the tallest bar."""

    bars: Sequence[_Bar]
    low: float
    high: float
    zero: float
    most: int


def render(report: Report) -> str:
    """Return the page as HTML."""
    numbers = [(name, _number(value)) for name, value in report.metrics.items()]
    histogram = _histogram(report.margins)
    return _PAGE.render(
        report=report,
        numbers=numbers,
        histogram=histogram,
        width=_PLOT_WIDTH,
        height=_PLOT_HEIGHT,
        number=_number,
        percent="{:.1%}".format,
    )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{_DIGITS}f}"


def _histogram(margins: Sequence[float]) -> _Histogram:
    """Return bins of equal width with an edge at zero, so that no bar mixes positive and negative margins."""
    values = np.asarray(margins, dtype=np.float64)
    width = max(float(np.ptp(np.append(values, 0.0))) / _BINS, 1e-9)
    # Count by bin number, not by bin edges: rounding could put a value outside all edges.
    numbers = np.floor(values / width).astype(int)
    first, last = min(int(numbers.min()), 0), max(int(numbers.max()), 0) + 1
    counts = np.bincount(numbers - first, minlength=last - first)
    most, step = int(counts.max()), _PLOT_WIDTH / (last - first)
    bars = [
        _Bar(
            left=round((number - first) * step, 2),
            top=round(_PLOT_HEIGHT * (1 - count / most), 2),
            width=round(step * 0.9, 2),
            height=round(_PLOT_HEIGHT * count / most, 2),
            positive=number >= 0,
            title=f"{_number(number * width)} to {_number((number + 1) * width)}: {count} pairs",
        )
        for number, count in enumerate(counts.tolist(), first)
        if count
    ]
    return _Histogram(bars, first * width, last * width, round(-first * step, 2), most)


_PAGE = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Evaluation of policy {{ report.policy }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; --good: #2a8f5b; --bad: #c4503f; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem; }
th, td { border-bottom: 1px solid var(--line); padding: .4rem .6rem; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; }
table.metrics { width: auto; }
code { background: var(--soft); padding: .1rem .3rem; border-radius: .2rem; }
svg { max-width: 100%; height: auto; }
.good { fill: var(--good); } .bad { fill: var(--bad); } .axis { stroke: currentColor; } text { fill: currentColor; }
</style>
</head>
<body>
<h1>Evaluation</h1>
<p>Policy <code>{{ report.policy }}</code> against reference <code>{{ report.reference }}</code>
on the held-out pairs of <code>{{ report.pairs }}</code>.</p>
<p>The policy gives the preferred response the higher reward in
<strong>{{ percent(report.accuracy.share) }}</strong> of {{ number(report.accuracy.pairs) }} pairs
{%- if report.accuracy.prompts < report.accuracy.pairs %}
, which have {{ number(report.accuracy.prompts) }} prompts
{%- endif %}
; 95% interval
{{ percent(report.accuracy.interval[0]) }} to {{ percent(report.accuracy.interval[1]) }}.</p>
<h2>Metrics</h2>
<table class="metrics">
{% for name, value in numbers %}
<tr><td><code>{{ name }}</code></td><td class="number">{{ value }}</td></tr>
{% endfor %}
</table>
{% macro accuracies(kinds) %}
<table class="metrics">
<tr><th>Pairs</th><th>Number</th><th>Accuracy</th><th>95% interval</th></tr>
{% for kind, found in kinds.items() %}
<tr><td>{{ kind }}</td><td class="number">{{ number(found.pairs) }}</td>
<td class="number">{{ percent(found.share) }}</td>
<td class="number">{{ percent(found.interval[0]) }} to {{ percent(found.interval[1]) }}</td></tr>
{% endfor %}
</table>
{% endmacro %}
{% if report.by_source %}
<h2>Accuracy by source</h2>
{{ accuracies(report.by_source) }}
{% endif %}
<h2>Accuracy by length</h2>
<p>A policy that learned only length is right if the chosen response is longer, and wrong if it is shorter.</p>
{{ accuracies(report.by_length) }}
<h2>Margins</h2>
<p>The margin of a pair is the reward of the chosen response minus the reward of the rejected one. To the right of zero the
policy agrees with the label. The tallest bar has {{ "{:,}".format(histogram.most) }} pairs.</p>
<svg viewBox="0 -4 {{ width }} {{ height + 28 }}" width="{{ width }}" role="img" aria-label="Histogram of the margins">
{% for bar in histogram.bars %}
<rect x="{{ bar.left }}" y="{{ bar.top }}" width="{{ bar.width }}" height="{{ bar.height }}"
 class="{{ "good" if bar.positive else "bad" }}"><title>{{ bar.title }}</title></rect>
{% endfor %}
<line x1="0" x2="{{ width }}" y1="{{ height }}" y2="{{ height }}" class="axis"/>
<line x1="{{ histogram.zero }}" x2="{{ histogram.zero }}" y1="0" y2="{{ height + 5 }}" class="axis"/>
<text x="0" y="{{ height + 20 }}" font-size="12">{{ number(histogram.low) }}</text>
<text x="{{ histogram.zero }}" y="{{ height + 20 }}" font-size="12" text-anchor="middle">0</text>
<text x="{{ width }}" y="{{ height + 20 }}" font-size="12" text-anchor="end">{{ number(histogram.high) }}</text>
</svg>
<h2>Samples</h2>
{% if report.samples %}
<table>
<tr><th>Row</th><th>Prompt</th><th>Before (reference)</th><th>After (policy)</th><th>Chosen in the data</th></tr>
{% for sample in report.samples %}
<tr><td class="number">{{ sample.row }}</td><td class="text">{{ sample.prompt }}</td>
<td class="text">{{ sample.before }}</td><td class="text">{{ sample.after }}</td>
<td class="text">{{ sample.chosen }}</td></tr>
{% endfor %}
</table>
{% else %}
<p>There are no samples, because evaluation.samples is 0.</p>
{% endif %}
<h2>Pairs of greatest loss</h2>
<p>Wrong labels show here first. Long texts are cut.</p>
<table>
<tr><th>Row</th><th>Loss</th><th>Margin</th><th>Prompt</th><th>Chosen</th><th>Rejected</th></tr>
{% for pair in report.worst %}
<tr><td class="number">{{ pair.row }}</td><td class="number">{{ number(pair.loss) }}</td>
<td class="number">{{ number(pair.margin) }}</td><td class="text">{{ pair.prompt }}</td>
<td class="text">{{ pair.chosen }}</td><td class="text">{{ pair.rejected }}</td></tr>
{% endfor %}
</table>
</body>
</html>
""")
