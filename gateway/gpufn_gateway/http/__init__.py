"""The HTTP server: connections, limits, request bodies and responses."""
