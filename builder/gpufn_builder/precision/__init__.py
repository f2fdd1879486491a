"""Conversion of a model to another precision."""
