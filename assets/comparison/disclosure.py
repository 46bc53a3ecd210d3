"""The meter of disclosure: how much the held-out pairs of a recipe and its variants have revealed.

`disclosure/<recipe>.jsonl` in the home has one line for each figure that was shown: an exact evaluation, the metrics during a
training, or a figure from votes. Lines are only added, so the meter does not fall when artifacts or versions are removed.

The meter sums the nats of all votes about held-out pairs that share a prompt with the current ones. Each vote counts with the
number of pairs at its time. This is safe: about the pairs still held out, a vote reveals at most as much as about all the pairs
it was drawn from (data processing inequality). An exact figure makes the meter unbounded. Only held-out pairs
without any earlier prompt begin anew. `disclosure/<raw_preferences>.prompts` has the prompts: `gc` may remove the pairs.

Pairs of one prompt are alike, so the number of pairs means prompts. The sums hold for one recipe folder in one home: a copy of
the recipe elsewhere has a meter of its own.

Legend: Q held-out prompts.
"""

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from training.contract.errors import StoreError
from training.contract.files.prompt_digests import prompt_digests
from training.contract.protocol.votes import bias_bound, nats_of_a_figure
from training.contract.store.artifact import Artifact
from training.contract.store.artifact_kind import StoredModel
from training.contract.system.atomic_io import sync_folder, write_durably
from training.contract.system.locks import locked

DISCLOSURE_FOLDER = "disclosure"
UNBOUNDED = "unbounded"
_DIGEST_BYTES = 8
_DIGEST = np.dtype("<u8")


class Disclosed(StoredModel):
    """One line: a shown figure.

    `of`: the fingerprint of an evaluation, or the key of a policy that was trained. `held_out`: the fingerprint of the
    `raw_preferences` with the pairs. `pairs` and `value` are of a figure from votes.
    """

    of: str
    figure: Literal["exact", "accuracy", "win"]
    held_out: str
    pairs: int | None = None
    value: float | None = None

    @property
    def nats(self) -> float:
        return math.inf if self.pairs is None else nats_of_a_figure(self.pairs)


@dataclass(frozen=True)
class Meter:
    """The `nats` that the current held-out pairs have revealed at most, infinite after an exact figure; their number."""

    nats: float
    pairs: int

    @property
    def bound(self) -> float:
        """The largest expected bias of a figure between 0 and 1."""
        return bias_bound(self.nats, self.pairs)

    @property
    def figures(self) -> dict[str, float | str]:
        """The figures for an asset's page."""
        if math.isinf(self.nats):
            return {"disclosed_nats": UNBOUNDED, "bias_bound": UNBOUNDED}
        return {"disclosed_nats": self.nats, "bias_bound": self.bound}


@dataclass(frozen=True)
class DisclosureLog:
    """The lines of a recipe and its variants. `family`: the name of the recipe's folder."""

    home: Path
    family: str

    @property
    def file(self) -> Path:
        return self.home / DISCLOSURE_FOLDER / f"{self.family}.jsonl"

    def add(self, shown: Disclosed, raw_preferences: Artifact) -> None:
        """Add a line, unless there is one about the same figure. `raw_preferences`: the artifact `shown.held_out`.

        Call it before the figure is shown. Raise StoreError if the file is damaged.
        """
        _keep_prompts(self._prompts_file(shown.held_out), raw_preferences)
        with locked(self.file.with_suffix(".lock")):
            if any((line.of, line.figure) == (shown.of, shown.figure) for line in self.lines()):
                return
            with open(self.file, "a+b") as file:
                content = self.file.read_bytes()
                file.truncate(content.rfind(b"\n") + 1)  # an unfinished line of a killed process
                file.write(shown.model_dump_json(exclude_none=True).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            sync_folder(self.file.parent)

    def lines(self) -> list[Disclosed]:
        """Return all complete lines. Raise StoreError for one that cannot be read: without it the meter is too low."""
        if not self.file.exists():
            return []
        complete = self.file.read_bytes().split(b"\n")[:-1]
        try:
            return [Disclosed.model_validate_json(line) for line in complete]
        except ValueError as error:
            raise StoreError(
                f"{self.file} has a line that is no record of a shown figure: restore the file from a backup",
                "corrupt-disclosure",
            ) from error

    def win(self, evaluation: str) -> float | None:
        """Return the win figure that was drawn for the evaluation with this fingerprint, or None."""
        return next((line.value for line in self.lines() if (line.of, line.figure) == (evaluation, "win")), None)

    def meter(self, held_out: str, pairs: int) -> Meter:
        """Return the meter of the `pairs` held-out pairs in the `raw_preferences` with the fingerprint `held_out`.

        An evaluation by votes without a win figure counts as if it had one, because its release draws it.
        """
        overlap = _Overlap(self, held_out)
        lines = [line for line in self.lines() if overlap.with_current(line.held_out)]
        won = {line.of for line in lines if line.figure == "win"}
        return Meter(sum(line.nats * _figures_of(line, won) for line in lines), pairs)

    def _prompts_file(self, held_out: str) -> Path:
        return self.home / DISCLOSURE_FOLDER / f"{held_out}.prompts"

    def prompts(self, held_out: str) -> npt.NDArray[np.uint64] | None:
        """Return uint64[Q], the digests of the held-out prompts; None if they are unknown."""
        file = self._prompts_file(held_out)
        return np.frombuffer(file.read_bytes(), dtype=_DIGEST) if file.is_file() else None


@dataclass(frozen=True)
class _Overlap:
    """Which held-out pairs share a prompt with the current ones."""

    log: DisclosureLog
    current: str

    @cached_property
    def _prompts(self) -> npt.NDArray[np.uint64] | None:
        return self.log.prompts(self.current)

    def with_current(self, held_out: str) -> bool:
        """Unknown prompts count as shared."""
        if held_out == self.current:
            return True
        earlier = self.log.prompts(held_out)
        return earlier is None or self._prompts is None or bool(np.isin(earlier, self._prompts).any())


def _figures_of(line: Disclosed, won: set[str]) -> int:
    """Return how many figures the line stands for."""
    return 2 if line.figure == "accuracy" and line.of not in won else 1


def _keep_prompts(file: Path, raw_preferences: Artifact) -> None:
    """Write the digests of the held-out prompts, unless they are known."""
    if not file.exists():
        held_out = prompt_digests(raw_preferences.folder, "validation")
        digests = b"".join(digest[:_DIGEST_BYTES] for digest in held_out)
        digests_Q = np.unique(np.frombuffer(digests, dtype=_DIGEST))
        write_durably(file, digests_Q.astype(_DIGEST).tobytes())
