"""Checkpoints: their files, and asynchronous saving."""
