"""What a person runs: recipes as Dagster components, the definitions object, and the command `pedigree`.

component, recipes                   from a defs.yaml to pipelines, found by name or path
recipe_file, faults, trl_names       what is wrong in a defs.yaml, with its line and what was meant
wrong_recipe                         what Dagster shows of such a recipe, so that the others go on
definitions, automation, resources   what Dagster loads; scaffold: what `init` and `dg scaffold` write
cli, reporting, progress, show       the command: what is typed, how it ends, its bars, its tables
execution, own_checks, run_report    `run`: what belongs to it beside the recipe, and what became of it
waiting                              how a run waits for a slot in a pool
outlook, lineage, plan               what a run would give; `status`; `plan`
serve, model_server, terminal_chat   `serve` and `chat`: a released version behind an address, or in the terminal
comparison, inspection, verify, gc   the other commands, each a file
ui, servers                          `ui`: what is shown, and the two web servers
"""

from workflows.component import PreferenceTuning

__all__ = ["PreferenceTuning"]
