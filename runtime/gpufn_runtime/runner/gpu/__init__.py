"""Turns on GPUs that functions share by time."""
