"""Queues and dicts by name, for functions and clients."""
