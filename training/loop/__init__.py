"""The training loop, the optimizer step and the objectives."""
