"""Which assets are fresh or stale, and what a run would give."""
