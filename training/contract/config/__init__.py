"""The recipe and its sections, as validated models."""
