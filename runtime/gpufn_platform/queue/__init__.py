"""Queues of calls on the bus: publish, pull, settle and find calls. `records/` has the stored records of calls."""
