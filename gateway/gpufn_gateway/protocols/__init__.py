"""Protocols of other platforms on the gateway's port. Each one is an adapter in its own folder."""
