"""Byte code of bundles: compiled by the agent once per version of Python, because workers cannot write it."""
