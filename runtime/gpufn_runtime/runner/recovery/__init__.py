"""Recovery after the loss of a runner, a caller, a worker or the bus."""
