"""The Jinja template of the report: style and page. `report.py` fills it.

All columns have a minimum width of 0 and long words break, so that the page fits a phone: no part scrolls sideways.
"""

STYLE = """\
:root { color-scheme: light dark; --line: #8885; --soft: #8881; --plus: #2a78d6; --minus: #d9622b; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem 1rem 4rem;
 overflow-wrap: anywhere; }
h1 { line-height: 1.2; margin: .5rem 0; } h2 { line-height: 1.25; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1.05rem; margin: 0 0 .5rem; } h4 { font-size: .875rem; margin: 0 0 .25rem; }
p { max-width: 48rem; }
code { background: var(--soft); padding: .1rem .3rem; border-radius: .2rem; white-space: pre-wrap; }
.columns { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 1rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(12rem, 100%), 1fr)); gap: .75rem; margin: 1rem 0; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .75rem 1rem; margin: 0 0 1rem; min-width: 0; }
.figures .card { margin: 0; } .value { font-size: 1.6rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.note { font-size: .875rem; opacity: .8; margin: 0 0 .5rem; } .part { margin: 0 0 .75rem; min-width: 0; }
.text, .tokens { white-space: pre-wrap; background: var(--soft); border-radius: .3rem; padding: .4rem .6rem; max-height: 24rem;
 overflow: hidden auto; }
.prompt .text { max-height: 12rem; display: flex; flex-direction: column-reverse; } /* begins at its end */
.tokens { font: .8125rem/1.9 ui-monospace, monospace; } .tokens span { border-radius: .15rem; padding: .1em 0; }
.tokens .untrained { opacity: .55; }
{% for level in range(1, levels + 1) %}
.p{{ level }} { background: color-mix(in srgb, var(--plus) {{ 8 * level }}%, transparent); }
.n{{ level }} { background: color-mix(in srgb, var(--minus) {{ 8 * level }}%, transparent); }
{% endfor %}
.scale { display: flex; gap: .5rem; align-items: center; font-size: .875rem; font-variant-numeric: tabular-nums; }
.scale i { flex: 0 1 14rem; height: .9rem; border-radius: .2rem; background: linear-gradient(90deg,
 color-mix(in srgb, var(--minus) 72%, transparent), transparent, color-mix(in srgb, var(--plus) 72%, transparent)); }
summary { cursor: pointer; } details.card > summary { font-weight: 600; } details[open] > summary { margin-bottom: .75rem; }
table { border-collapse: collapse; margin: .5rem 0 1rem; max-width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .5rem .35rem 0; text-align: left; vertical-align: top; }
th, .number { overflow-wrap: normal; }
.number { text-align: right; font-variant-numeric: tabular-nums; padding-left: .5rem; }
figure { margin: 0; min-width: 0; } svg { display: block; width: 100%; max-width: 34rem; height: auto; }
svg text { fill: currentColor; font-size: 14px; } .axis { stroke: currentColor; } .zero { stroke: currentColor; opacity: .5;
 stroke-dasharray: 4 4; } .trend { stroke: currentColor; stroke-width: 2; }
.plus { fill: var(--plus); } .minus { fill: var(--minus); } circle { fill-opacity: .6; }
@media (max-width: 46rem) { .columns { grid-template-columns: minmax(0, 1fr); } body { padding: .5rem 1rem 3rem; } }
"""

MACROS = """\
{% macro part(title, text, kind="") %}
<div class="part {{ kind }}"><h4>{{ title }}</h4><div class="text">{{ text or "(empty)" }}</div></div>
{% endmacro %}
{% macro accuracies(kinds) %}
<table>
<tr><th>Pairs</th><th class="number">Number</th><th class="number">Accuracy</th><th class="number">95% interval</th></tr>
{% for kind, found in kinds.items() %}
<tr><td>{{ kind }}</td><td class="number">{{ number(found.pairs) }}</td>
<td class="number">{{ percent(found.share) }}</td>
<td class="number">{{ percent(found.interval[0]) }} to {{ percent(found.interval[1]) }}</td></tr>
{% endfor %}
</table>
{% endmacro %}
{% macro sample_card(sample) %}
<section class="card">
<h3>Row {{ sample.row }}</h3>
{{ part("Prompt", sample.prompt, "prompt") }}
<div class="columns">
{{ part("Before (reference)", sample.before) }}
{{ part("After (policy)", sample.after) }}
</div>
{% if sample.before == sample.after %}
<p>The answer did not change.</p>
{% endif %}
{{ part("Chosen in the data", sample.chosen) }}
</section>
{% endmacro %}
{% macro heat(side, response) %}
<div class="part">
<h4>{{ side }}</h4>
<p class="note">Sum {{ signed(response.total) }} over {{ number(response.count) }} tokens.
{%- if response.strongest() %} Strongest:
{%- for text, reward in response.strongest() %} <code>{{ visible(text) }}</code> {{ signed(reward) }}
{%- if not loop.last %},{% endif %}{% endfor %}.{% endif %}</p>
<div class="tokens">
{%- for token in response.tokens -%}
{%- if token.reward is none -%}
<span class="untrained" title="not trained">{{ visible(token.text) }}</span>
{%- else -%}
<span{{ level(token.reward) }} title="{{ signed(token.reward) }}">{{ visible(token.text) }}</span>
{%- endif -%}
{%- endfor -%}
</div>
{% if response.omitted %}
<p class="note">{{ number(response.omitted) }} more tokens are not shown.</p>
{% endif %}
</div>
{% endmacro %}
"""

CHARTS = """\
<h2>Margins</h2>
<p>The margin of a pair is the reward of the chosen response minus the reward of the rejected one. Above zero the policy agrees
with the label.</p>
<div class="columns">
<figure>
<h3>How many pairs have which margin</h3>
<svg viewBox="-8 -6 {{ width + 20 }} {{ height + 50 }}" role="img" aria-label="Histogram of the margins">
{% for bar in histogram.bars %}
<rect x="{{ bar.left }}" y="{{ bar.top }}" width="{{ bar.width }}" height="{{ bar.height }}"
 class="{{ "plus" if bar.is_positive else "minus" }}"><title>{{ bar.title }}</title></rect>
{% endfor %}
<line x1="0" x2="{{ width }}" y1="{{ height }}" y2="{{ height }}" class="axis"/>
<line x1="{{ histogram.zero }}" x2="{{ histogram.zero }}" y1="0" y2="{{ height }}" class="zero"/>
{{ x_labels(histogram.ticks, "margin") }}
</svg>
<figcaption class="note">The tallest bar has {{ number(histogram.most) }} pair
{{- "s" if histogram.most != 1 }}.</figcaption>
</figure>
<figure>
<h3>Margin by difference of length</h3>
<svg viewBox="-56 -6 {{ width + 68 }} {{ height + 50 }}" role="img" aria-label="Margins by difference of length">
<line x1="0" x2="{{ width }}" y1="{{ height }}" y2="{{ height }}" class="axis"/>
<line x1="0" x2="0" y1="0" y2="{{ height }}" class="axis"/>
<line x1="{{ scatter.zero[0] }}" x2="{{ scatter.zero[0] }}" y1="0" y2="{{ height }}" class="zero"/>
<line x1="0" x2="{{ width }}" y1="{{ scatter.zero[1] }}" y2="{{ scatter.zero[1] }}" class="zero"/>
{% for point in scatter.points %}
<circle cx="{{ point.x }}" cy="{{ point.y }}" r="4"
 class="{{ "plus" if point.is_positive else "minus" }}"><title>{{ point.title }}</title></circle>
{% endfor %}
{% if scatter.trend %}
<line x1="{{ scatter.trend[0] }}" y1="{{ scatter.trend[1] }}" x2="{{ scatter.trend[2] }}" y2="{{ scatter.trend[3] }}"
 class="trend"/>
{% endif %}
{% for tick in scatter.y_ticks %}
<text x="-6" y="{{ tick.at + 5 }}" text-anchor="end">{{ tick.text }}</text>
{% endfor %}
<text x="-52" y="{{ height / 2 }}" transform="rotate(-90 -46 {{ height / 2 }})" text-anchor="middle">margin</text>
{{ x_labels(scatter.x_ticks, "chosen minus rejected tokens") }}
</svg>
<figcaption class="note">{{ scatter.sentence }} The line is the least-squares fit.
{%- if scatter.points|length < scatter.pairs %} {{ number(scatter.points|length) }} of the pairs are drawn.{% endif %}
</figcaption>
</figure>
</div>
"""

X_LABELS = """\
{% macro x_labels(ticks, name) %}
{% for tick in ticks %}
<text x="{{ tick.at }}" y="{{ height + 18 }}" text-anchor="
{{- "start" if tick.at < 20 else "end" if tick.at > width - 20 else "middle" }}">{{ tick.text }}</text>
{% endfor %}
<text x="{{ width / 2 }}" y="{{ height + 38 }}" text-anchor="middle">{{ name }}</text>
{% endmacro %}
"""

PAGE = (
    """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Evaluation of policy {{ report.policy }}</title>
<style>
{{ style }}</style>
</head>
<body>
<h1>Evaluation</h1>
<!-- release -->
<p>Made on {{ date }} UTC
{%- if report.model_name %} by a recipe that releases <code>{{ report.model_name }}</code>{% endif %}.
Policy <code>{{ report.policy }}</code> against reference <code>{{ report.reference }}</code>
on the held-out pairs of <code>{{ report.pairs }}</code>.</p>
<div class="figures">
{% for figure in figures %}
<section class="card"><h3>{{ figure.name }}</h3><div class="value">{{ figure.value }}</div>
<div class="note">{{ figure.note }}</div></section>
{% endfor %}
</div>
<p class="note">All figures are means over the held-out pairs. {{ reward_meaning }}</p>
<h2>Answers before and after</h2>
{% if report.samples %}
<p>The policy answers {{ changed }} of {{ report.samples|length }} prompts differently from the reference model.</p>
{% for sample in report.samples[:open_samples] %}
{{ sample_card(sample) }}
{% endfor %}
{% if report.samples|length > open_samples %}
<details><summary>{{ report.samples|length - open_samples }} more answers</summary>
{% for sample in report.samples[open_samples:] %}
{{ sample_card(sample) }}
{% endfor %}
</details>
{% endif %}
{% else %}
<p>There are no samples, because evaluation.samples is 0.</p>
{% endif %}
"""
    + CHARTS
    + """\
{% if report.by_source %}
<h2>Accuracy by source</h2>
{{ accuracies(report.by_source) }}
{% endif %}
<h2>Accuracy by length</h2>
<p>A policy that learned only length is right if the chosen response is longer, and wrong if it is shorter.</p>
{{ accuracies(report.by_length) }}
<h2>{{ "Log-ratios" if report.rewards.beta is none else "Rewards" }} by token</h2>
<p>
{%- if report.rewards.beta is none -%}
The loss uses no reference model, so its reward is no sum over these values. The value of a token is its log-ratio in nats:
{%- else -%}
The value of a token is its implicit reward, beta ({{ "{:g}".format(report.rewards.beta) }}) times its log-ratio in nats:
{%- endif %} the log-prob under
the policy minus the log-prob under the reference model. Training made blue tokens more probable, and orange ones less. The
value is shown when the pointer rests on the token.</p>
<p class="scale"><span>{{ signed(-report.rewards.full) }} or less</span><i></i>
<span>{{ signed(report.rewards.full) }} or more</span></p>
{% for pair in report.rewards.pairs %}
<details class="card"{% if loop.index <= open_pairs %} open{% endif %}>
<summary>Row {{ pair.row }}: {{ "difference" if report.rewards.beta is none else "margin" }}
 {{ signed(pair.chosen.total - pair.rejected.total) }}
{%- if pair.row in worst_rows %}, among the greatest losses{% endif %}</summary>
{{ part("End of the prompt", pair.prompt, "prompt") }}
<div class="columns">
{{ heat("Chosen", pair.chosen) }}
{{ heat("Rejected", pair.rejected) }}
</div>
</details>
{% endfor %}
<h2>Pairs of greatest loss</h2>
<p>Wrong labels show here first. Long texts are cut.</p>
{% for pair in report.worst %}
<section class="card">
<h3>Row {{ pair.row }}: loss {{ number(pair.loss) }}, margin {{ number(pair.margin) }}</h3>
{{ part("Prompt", pair.prompt, "prompt") }}
<div class="columns">
{{ part("Chosen", pair.chosen) }}
{{ part("Rejected", pair.rejected) }}
</div>
</section>
{% endfor %}
<h2>All metrics</h2>
<details><summary>{{ numbers|length }} metrics, by their names in MLflow</summary>
<table>
{% for name, value in numbers %}
<tr><td><code>{{ name }}</code></td><td class="number">{{ value }}</td></tr>
{% endfor %}
</table>
</details>
</body>
</html>
"""
)
