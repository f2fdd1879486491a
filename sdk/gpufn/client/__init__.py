"""Python client for the gateway's HTTP API."""
