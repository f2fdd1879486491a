"""Terminal input and output shared by all commands."""
