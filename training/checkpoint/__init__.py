"""Checkpoints: their files, and saving in a thread."""
