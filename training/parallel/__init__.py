"""Weights and gradients on one process or many."""
