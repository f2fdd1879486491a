"""The worker: a sandboxed process that holds one Revision and runs its user code. It has no connection to the bus."""
