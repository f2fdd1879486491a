"""Volumes, dicts, queues and stored values: how programs reach them."""
