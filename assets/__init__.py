"""The Dagster assets: what there is, what each is made from, and how one is materialized. Nothing here imports torch.

graph, declare, conditions           the table of a pipeline; Dagster's assets from it; when they materialize by themselves
pipeline, step                       a recipe under its name, with its services; one of its assets as it is materialized
names                                which recipe a name belongs to, where two have it
sources, specs, data, reference,     the bodies of the assets, a file a stage
  policy, evaluation, release
realize                              what nearly every body does: ask the store, else launch a job
world, locate, named_model,          what sources and specs would be now: files, models and data sets, and where the
  written, counting                  recipe names them
materialized, kinship, process,      what Dagster recorded, whether it goes together, which process works on a run, and
  records                            which Dagster records the runs of a home
changes, tokenizer_changes,          what changed since, in words
  pair_changes
checks, metadata, event_log,         what people see of an artifact, of a job, of a pair
  rows, page
version_files                        what a registered version consists of, put back where it is gone or not what it was
held_out, champion                   the values by which the gate and `pedigree compare` compare two policies; the champion's
leakage                              which held-out prompts a policy before was trained on
adapters, rescoring                  jobs whose results are no assets: a merged adapter, pairs scored again
"""
