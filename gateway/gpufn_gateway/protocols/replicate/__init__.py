"""Replicate: predictions, models, versions and files."""
