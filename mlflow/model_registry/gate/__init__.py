"""The gate: whether a candidate becomes champion."""
