"""The latest reports of nodes and their GPUs."""
