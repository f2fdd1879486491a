"""How a worker's process comes to be."""
