"""Secrets of functions, encrypted in a bucket."""
