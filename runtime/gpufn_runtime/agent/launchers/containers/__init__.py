"""Workers in Docker containers."""
