"""A command in its own worker, connected to a client."""
