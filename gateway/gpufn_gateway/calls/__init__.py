"""Calls on their way from an HTTP request to a queue or to a runner."""
