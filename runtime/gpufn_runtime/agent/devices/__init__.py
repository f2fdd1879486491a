"""Devices of a node: GPUs that the NVIDIA driver reports, the CPU pool, and devices declared in settings."""
