"""Everything that runs where the devices are: agent, runner, worker."""
