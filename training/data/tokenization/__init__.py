"""From pairs to token ids, and from these to batches."""
