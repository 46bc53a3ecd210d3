"""The user's side: recipes as Dagster components, the definitions object, and the command `pedigree`.

definitions      what Dagster loads
cli/             the command `pedigree`: its options, output, tables and progress
commands/        what `run`, `plan`, `verify`, `compare`, `inspect` and `gc` do
recipes/         finds, reads and validates recipes; proposes settings for new ones
orchestration/   schedules, sensors, the pool, the places in PEDIGREE_HOME
servers/         processes that serve pages and models
state/           which assets are fresh or stale, and what a run would give
"""

from workflows.recipes.component import PreferenceTuning

__all__ = ["PreferenceTuning"]
