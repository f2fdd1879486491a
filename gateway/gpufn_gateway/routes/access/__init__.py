"""Routes of keys, users, teams, secrets, signatures, and of what they used."""
