"""What each kind of job does, a file a kind. `training.main` calls `run` of one of them."""
