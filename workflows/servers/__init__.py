"""Processes for web pages and models."""
