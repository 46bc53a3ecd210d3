"""A simulated mean with its Monte Carlo standard error."""

import math
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True)
class Estimate:
    mean: float
    error: float

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> "Estimate":
        return cls(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)))

    def __format__(self, spec: str) -> str:
        """Return `0.757 ± 0.021`, both numbers in the format `spec`."""
        return f"{self.mean:{spec}} ± {self.error:{spec}}"
