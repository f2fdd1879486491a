"""Queues of calls on the bus: publish, pull, settle, record and find calls."""
