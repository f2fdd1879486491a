"""Protocols of other platforms on the gateway's port. Each protocol is an adapter in its own folder."""
