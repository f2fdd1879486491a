"""The worker: the sandboxed process that holds one Revision and runs its user's code. It knows no bus."""
