"""Scoring: log-probs without gradients, and checks of them."""
