"""Web sessions: calls that receive input while they run."""
