"""Turns on time-shared GPUs."""
