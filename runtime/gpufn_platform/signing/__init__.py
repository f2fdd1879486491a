"""Signatures of deploys on the platform: the trusted keys on the bus and on the node."""
