"""The jobs, one file per kind. `training.main` calls the `run` of a job's kind."""
