"""Recipes: found, read, validated, and proposed."""
