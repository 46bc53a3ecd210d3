"""The user's side: recipes as Dagster components, the definitions object, and the command `pedigree`.

* `definitions`: the definitions loaded by Dagster.
* `cli/`: the command `pedigree`: its options, output, tables and progress.
* `commands/`: the work of `run`, `plan`, `verify`, `compare`, `inspect` and `gc`.
* `recipes/`: finds, reads and validates recipes; proposes settings for new ones.
* `orchestration/`: schedules, sensors, the pool, the folders in PEDIGREE_HOME.
* `servers/`: processes for web pages and models.
* `state/`: which assets are fresh or stale, and the result of a run.
"""

from workflows.recipes.component import PreferenceTuning

__all__ = ["PreferenceTuning"]
