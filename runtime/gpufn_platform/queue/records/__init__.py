"""Records of calls on the bus: the calls themselves, their index, starts, checkpoints and dead letters."""
