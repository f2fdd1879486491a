"""Volumes: their records, commits, and the removal of unused files."""
