"""Placement: the node and GPUs of a worker, or the reason why none fits. Pure."""
