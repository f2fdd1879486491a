"""Requests of user code to the platform, over the worker's socket."""
