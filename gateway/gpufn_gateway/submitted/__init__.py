"""Submitted calls: storage, status, events, dead letters, and the end of calls that no runner will run."""
