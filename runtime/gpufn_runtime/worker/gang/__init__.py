"""A gang: a worker with a process ("rank") on each of several nodes. Rank 0 takes the calls and passes them on."""
