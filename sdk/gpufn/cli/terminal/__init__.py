"""Terminal input and output that all commands share."""
