"""Attention over rows in which sequences share a prompt."""
