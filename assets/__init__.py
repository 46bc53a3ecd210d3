"""The Dagster assets of a recipe. Nothing here imports torch. Each folder imports only from those below it.

factory       builds Dagster's assets from the graph
bodies/       what each asset does, its checks, and when it is materialized automatically
comparison/   a candidate against the champion
execution/    how an asset gets its artifact: from the store, or from a job
views/        tables, pictures and pages about artifacts
lineage/      what Dagster recorded, and what changed since
inputs/       the files, models and data sets that a recipe names
pipeline/     the graph of the assets; a recipe with its name and services
"""
