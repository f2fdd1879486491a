"""Profiles of workers: folded stacks, and the traces of GPUs."""
