"""Requests of user code to the platform, over the socket of the worker."""
