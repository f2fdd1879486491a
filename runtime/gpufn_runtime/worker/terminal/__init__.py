"""A command in a worker of its own, connected to a client."""
