"""Routes of keys, users, teams, secrets and signatures, and of their usage."""
