"""The table of reference log-probs: `logprobs.safetensors`, a row a pair, aligned with the rows of `pairs.arrow`.

    chosen_logprobs float64[P]    chosen_tokens int32[P]    rejected_logprobs float64[P]    rejected_tokens int32[P]

A loss with `ld_alpha` needs more: `tails_P2`, the part of each sum beyond the common length of the pair's responses. It is
not in the file, since few need it; training/tails.py takes it from the memo.

The header has the rule and the dtype of the values, so that a policy can be scored in the same way.
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
    """P pairs: the summed log-prob of each response under the reference, in nats, and how many tokens it has."""

    chosen_logprobs: npt.NDArray[np.float64]
    chosen_tokens: npt.NDArray[np.int32]
    rejected_logprobs: npt.NDArray[np.float64]
    rejected_tokens: npt.NDArray[np.int32]
    rule: str
    dtype: str
    tails_P2: npt.NDArray[np.float64] | None = None

    @property
    def logprobs_P2(self) -> npt.NDArray[np.float64]:
        return np.stack([self.chosen_logprobs, self.rejected_logprobs], axis=1)

    @property
    def tokens_P2(self) -> npt.NDArray[np.int32]:
        return np.stack([self.chosen_tokens, self.rejected_tokens], axis=1)

    def __len__(self) -> int:
        return len(self.chosen_logprobs)

    def write(self, folder: Path) -> None:
        arrays = {name: np.ascontiguousarray(getattr(self, name), dtype=dtype) for name, dtype in _DTYPES.items()}
        save_file(arrays, folder / TABLE_FILE, metadata={"rule": self.rule, "dtype": self.dtype})

    @classmethod
    def read(cls, folder: Path, pairs: int) -> "LogProbTable":
        """The table of an artifact, for a data set of `pairs` pairs. Raises CorruptArtifact if it is not aligned."""
        path = folder / TABLE_FILE
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in _DTYPES}
                metadata = file.metadata() or {}
                table = cls(**arrays, rule=metadata["rule"], dtype=metadata["dtype"])
        except (OSError, SafetensorError, KeyError) as error:
            raise CorruptArtifact(f"{path} is not a table of reference log-probs: {error}") from error
        for name, dtype in _DTYPES.items():
            if arrays[name].shape != (pairs,) or arrays[name].dtype != dtype:
                raise CorruptArtifact(
                    f"{path}: {name} is {arrays[name].dtype}{list(arrays[name].shape)}, "
                    f"expected {np.dtype(dtype)}[{pairs}]; materialize reference_logprobs again"
                )
        return table
