"""The training loop, one optimizer step, and what is minimized."""
