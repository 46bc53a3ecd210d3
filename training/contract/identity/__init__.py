"""Fingerprints of values, files, tokenizers, models and software."""
