"""Endpoints of the HTTP API, each group as a mixin of `Client`."""
