"""What a person runs: recipes as Dagster components, the definitions object, and the command `pedigree`.

- component, recipes: a recipe's folder as pipelines, found by its name or path.
- recipe_file, faults, trl_names: what is wrong in a defs.yaml, with its line and what was meant.
- wrong_recipe: what Dagster shows of a wrong recipe, so that the others go on.
- definitions, automation, resources: what Dagster loads.
- scaffold: what `init` and `dg scaffold` write.
- cli, reporting, progress, show: the command, how it ends, its bars and its tables.
- execution, own_checks, run_report: `run`, its own checks, and what it reports.
- waiting: how a run waits for a slot in a pool.
- outlook, lineage, plan: what a run would give; `status`; `plan`.
- serve, model_server, terminal_chat: `serve` and `chat`, with a released version.
- comparison, inspection, verify, gc: the other commands, each a file.
- ui, servers: `ui`, and the two web servers that it starts.
"""

from workflows.component import PreferenceTuning

__all__ = ["PreferenceTuning"]
