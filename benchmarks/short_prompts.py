"""The comparison of training.py on short prompts: `python -m benchmarks.short_prompts DATA`.

Instructions of a line or two with answers of a sentence: padding and repeated prompts cost TRL least here. The ratios have no
limit. Losses and rewards of every step must agree all the same: exit status 1 if not.
"""

import sys

from benchmarks.setting import machine
from benchmarks.training import STEP_TOLERANCE, arguments_of, compare, costs_table, operations_of, step_difference
from benchmarks.workload import short_rows


def main() -> int:
    arguments = arguments_of(__doc__)
    sys.stdout.write(machine(arguments.threads) + "\n")
    found, peers = compare(arguments.data, short_rows, arguments.micro_tokens, arguments.threads)
    sys.stdout.write(costs_table(found, peers))
    operations = operations_of(arguments.data, short_rows, arguments.micro_tokens)
    sys.stdout.write(
        f"operations: {operations.least / 1e9:,.0f} G at least, {operations.kept / operations.least:.3f} of it\n"
    )
    return int(any(step_difference(found, peer) > STEP_TOLERANCE for peer in peers.values()))


if __name__ == "__main__":
    sys.exit(main())
