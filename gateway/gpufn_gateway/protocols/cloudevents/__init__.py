"""CloudEvents: events as arguments, and results as events."""
