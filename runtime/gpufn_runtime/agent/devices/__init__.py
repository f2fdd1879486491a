"""What a node has: GPUs as the driver tells (`nvml`), the CPU pool, or what the settings declare (`declared`)."""
