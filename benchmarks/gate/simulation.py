"""Simulated years under the gate: `python -m benchmarks.gate.simulation [--years 2000] [--workers 2]`.

One year has 52 retrainings, and all of them use the same held-out prompts. The first tables have the rates of error for each
kind of candidate (`policies.Scenario`) under three rules:

    ladder           better by more than one standard error on the held-out prompts
    5% each time     the same with 1.645 standard errors
    anytime          evidence from held-out prompts and 200 arriving pairs a week (`anytime.Anytime`), alpha 0.05

A promotion is false if the new champion is not better than the one before. `false discovery rate` is the mean over years of
false promotions / max(1, promotions). `excess` is by how much the last champion's held-out score is too good, in standard
errors of a difference. `quality` is the true gain of the last champion over the first, in standard deviations of a difference.
The other tables have the power of `anytime`. Exit status 1 if a rate or a power misses its limit.
"""

import argparse
import sys
import time

from benchmarks.gate.capital import ALPHA
from benchmarks.gate.policies import Scenario
from benchmarks.gate.power import HELD_OUT, Metric, needed_gains, power
from benchmarks.gate.years import ANYTIME, YEARS_A_BATCH, Rates, simulate
from benchmarks.setting import table

PROMPTS = (500, 100)
NUMBERS = (1, 10, 52)
GAIN, WEEKS, LEAST_POWER = 2.8, 4, 0.8
RUNS = 2000


def rate_rows(scenario: Scenario, rates: dict[str, Rates]) -> list[list[str]]:
    return [
        [
            scenario,
            rule,
            f"{found.discovery_rate:.3f}",
            f"{found.any_false:.3f}",
            f"{found.excess:.2f}",
            f"{found.promotions:.2f}",
            f"{found.quality:.3f}",
        ]
        for rule, found in rates.items()
    ]


def simulate_years(prompts: int, years: int, workers: int) -> list[str]:
    """Print the table for so many held-out prompts. Return the misses. Candidates tuned on them have no limit."""
    rows = [["candidates", "rule", "false discovery rate", "a false promotion", "excess", "promotions", "quality"]]
    misses = []
    for scenario in Scenario:
        rates = simulate(scenario, prompts, years, workers)
        rows += rate_rows(scenario, rates)
        found = rates[ANYTIME].discovery_rate
        if scenario != Scenario.TUNED and found.mean > ALPHA:
            misses.append(f"{scenario} candidates, {prompts} prompts: false discovery rate {found:.3f} > {ALPHA}")
    sys.stdout.write(f"\n{years:,} years with {prompts} held-out prompts\n\n{table(rows)}")
    return misses


def simulate_power() -> list[str]:
    """Print the tables of power. Return the misses."""
    rows, misses = [["compared", "hypothesis", *(f"weeks: {weeks}" for weeks in range(1, WEEKS + 1))]], []
    for metric in Metric:
        for number in NUMBERS:
            found = [power(metric, number, GAIN, weeks, RUNS) for weeks in range(1, WEEKS + 1)]
            rows.append([metric, str(number), *(f"{share:.2f}" for share in found)])
            if number == 10 and found[-1] < LEAST_POWER:
                misses.append(f"{metric}: the 10th hypothesis has a power of {found[-1]:.2f} < {LEAST_POWER}")
    sys.stdout.write(f"\nPower on arriving pairs, better by {GAIN} standard errors of a week's pairs\n\n{table(rows)}")
    needed = [["hypothesis", "true gain for 0.5", "for 0.8", "measured gain for 0.5", "for 0.8"]]
    for number in NUMBERS:
        gains = [gain for pair in needed_gains(number, (0.5, 0.8), RUNS) for gain in pair]
        needed.append([str(number), *(f"{gain:.1f}" for gain in gains)])
    sys.stdout.write(f"\nStandard errors of {HELD_OUT} held-out prompts to pass at once\n\n{table(needed)}")
    return misses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--years", type=int, default=2000, help=f"in steps of {YEARS_A_BATCH}")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    options = parser.parse_args()
    started = time.monotonic()
    misses = [miss for prompts in PROMPTS for miss in simulate_years(prompts, options.years, options.workers)]
    misses += simulate_power()
    sys.stdout.write(f"\n{time.monotonic() - started:.0f} seconds\n")
    for miss in misses:
        sys.stdout.write(f"MISS  {miss}\n")
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
