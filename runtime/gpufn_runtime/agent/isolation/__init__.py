"""Isolation of workers: the sandboxes of processes, and which tiers this node offers."""
