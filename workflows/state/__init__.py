"""Which assets are fresh or stale, and the result of a run."""
