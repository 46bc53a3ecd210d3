"""The table of reference log-probs: `logprobs.safetensors`, one row per pair, aligned with the rows of `pairs.arrow`.

    chosen_logprobs float64[P]    chosen_tokens int32[P]    rejected_logprobs float64[P]    rejected_tokens int32[P]

A loss with `ld_alpha` also needs `tails_P2`, the part of each sum beyond the common length of the pair's responses. The file
does not hold it, because few recipes need it: training/scoring/logprob_tails.py computes it from the log-prob cache.

The header holds the rule and the dtype, to score a policy in the same way.

Legend: P pairs, 2 responses (chosen, rejected).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from training.contract.errors import CorruptArtifact

TABLE_FILE = "logprobs.safetensors"
_DTYPES = {
    "chosen_logprobs": np.float64,
    "chosen_tokens": np.int32,
    "rejected_logprobs": np.float64,
    "rejected_tokens": np.int32,
}


@dataclass(frozen=True)
class LogProbTable:
    """For P pairs and both responses: the summed log-prob under the reference model, in nats, and the number of tokens."""

    logprobs_P2: npt.NDArray[np.float64]
    tokens_P2: npt.NDArray[np.int32]
    rule: str
    dtype: str
    tails_P2: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.logprobs_P2)

    def columns(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the columns of the file, each [P]."""
        columns = (self.logprobs_P2[:, 0], self.tokens_P2[:, 0], self.logprobs_P2[:, 1], self.tokens_P2[:, 1])
        return {name: np.ascontiguousarray(column) for name, column in zip(_DTYPES, columns, strict=True)}

    def write(self, folder: Path) -> None:
        save_file(self.columns(), folder / TABLE_FILE, metadata={"rule": self.rule, "dtype": self.dtype})

    @classmethod
    def read(cls, folder: Path, pairs: int) -> "LogProbTable":
        """Read the table of an artifact with `pairs` pairs. Raises CorruptArtifact for another shape or dtype."""
        path = folder / TABLE_FILE
        try:
            with safe_open(path, framework="numpy") as file:
                columns = {name: file.get_tensor(name) for name in _DTYPES}
                metadata = file.metadata() or {}
                rule, dtype = metadata["rule"], metadata["dtype"]
        except (OSError, SafetensorError, KeyError) as error:
            raise CorruptArtifact(
                f"{path} is not a table of reference log-probs: {error}", "corrupt-logprob-table"
            ) from error
        for name, expected in _DTYPES.items():
            if columns[name].shape != (pairs,) or columns[name].dtype != expected:
                raise CorruptArtifact(
                    f"{path}: {name} is {columns[name].dtype}{list(columns[name].shape)}, "
                    f"expected {np.dtype(expected)}[{pairs}]; run `pedigree rescore RECIPE` to compute it again",
                    "corrupt-logprob-table",
                )
        chosen, chosen_tokens, rejected, rejected_tokens = columns.values()
        return cls(
            np.stack([chosen, rejected], axis=1), np.stack([chosen_tokens, rejected_tokens], axis=1), rule, dtype
        )
