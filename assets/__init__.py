"""The Dagster assets of a recipe. Nothing here imports torch. Each folder imports only from those below it.

* `factory`: builds Dagster's assets from the graph.
* `bodies/`: the function behind each asset, the checks, and the automation condition.
* `comparison/`: a candidate against the champion.
* `execution/`: how an asset gets its artifact: from the store, or from a job.
* `views/`: tables, pictures and pages about artifacts.
* `lineage/`: recorded materializations, and changes since the latest one.
* `inputs/`: the files, models and data sets that a recipe names.
* `pipeline/`: the graph of the assets; a recipe with its name and services.
"""
