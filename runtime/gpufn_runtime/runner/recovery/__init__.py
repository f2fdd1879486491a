"""Recovery after a runner, a caller, a worker or the bus was lost."""
