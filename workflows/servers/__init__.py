"""Processes that serve pages and models."""
