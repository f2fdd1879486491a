"""Prepare the calls of HTTP requests, and send them to a queue or to a runner."""
