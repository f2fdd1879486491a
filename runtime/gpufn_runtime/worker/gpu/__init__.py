"""GPU memory, MPS shares and CUDA errors in a worker."""
