"""Write docs/reference/faults.md from the notes of the tests: `python -m tests.faults.page NOTES`; `make faults` does both."""

import json
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "faults.md"
SECTIONS = {
    "test_kills": ("Signals", "The signal came when the stage began to write its result."),
    "test_hangs": ("Processes that stand still", "SIGSTOP, as a debugger or a frozen container does."),
    "test_disk_and_memory": ("Disk and memory", "It happened when the stage began to write its result."),
    "test_lost_servers": ("MLflow and the databases", "Requests are methods of `MlflowClient`."),
    "test_two_writers": ("Two commands at once", "In one home."),
    "test_changes": (
        "Files that change during a run",
        "It happened when the stage wrote its result, unless the row says otherwise.",
    ),
    "test_damaged_files": ("Damaged files", "Between two runs. The jobs run in the process of the test."),
    "test_hostile_inputs": (
        "Hostile inputs",
        "None of them ran code, or took more than 2.5 GiB. The jobs run in the process of the test. Seconds: until the answer.",
    ),
}
HEAD = """# Faults

What happens when something fails. Tests make each fault, mostly with real processes, and wrote this page.
`make faults` repeats them in {minutes}. Codes are explained in [errors](errors.md).

* **Left**: the seconds until no process of the run was left.
* **Bits**: after the fault, the next run gave the same artifacts as a run without it, by their fingerprints. Each has a
  fingerprint of its contents; a policy's includes every weight.

{count} faults:
"""
COLUMNS = "| stage | fault | what happened | left | bits |\n|---|---|---|---|---|\n"


def page(notes: list[dict[str, object]]) -> str:
    """Return the page. The last note of a fault counts."""
    latest = {(note["file"], note["stage"], note["fault"]): note for note in notes}
    parts = [HEAD.format(count=len(latest), minutes="half an hour")]
    for file, (title, when) in SECTIONS.items():
        rows = [note for (of, _, _), note in sorted(latest.items(), key=str) if of == file]
        if not rows:
            raise SystemExit(f"no notes of {file}")
        parts.append(f"\n## {title}\n\n{when}\n\n{COLUMNS}" + "".join(map(_row, rows)))
    return "".join(parts)


def _row(note: dict[str, object]) -> str:
    seconds = note["seconds"]
    left = f"{seconds:.1f} s" if isinstance(seconds, float) else ""
    bits = "same" if note["same"] else ""
    return f"| {note['stage']} | {note['fault']} | {note['outcome']} | {left} | {bits} |\n"


if __name__ == "__main__":
    PAGE.write_text(page([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
