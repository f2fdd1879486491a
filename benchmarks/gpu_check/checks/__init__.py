"""The steps, by topic. Each takes the Machine and returns a Finding, or raises CannotRun."""
