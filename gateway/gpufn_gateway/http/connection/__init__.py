"""Connections below ASGI: the uvicorn server and its HTTP protocol, TLS, limits, and how responses are written."""
