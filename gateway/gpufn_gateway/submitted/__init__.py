"""Submitted calls: storage, status, events, resumable streams, dead letters, and reaping of calls that cannot run."""
