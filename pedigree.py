"""The command `pedigree`, as it begins: what it does is in `workflows.cli`, whose imports take seconds.

Ctrl-C within them ends it without a word, since nothing has happened yet. Python's own handler would show the inside of the
library that is being imported.
"""

import signal

from training.contract.imports import import_uncollected


def main() -> None:
    is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    if is_pythons:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    cli = import_uncollected("workflows.cli")
    if is_pythons:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
