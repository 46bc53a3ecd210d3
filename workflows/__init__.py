"""What a person runs: recipes as Dagster components, the definitions object, and the command `pedigree`."""

from workflows.component import PreferenceTuning

__all__ = ["PreferenceTuning"]
