"""GPUs and other devices: identity, figures, fair queue, and the engines built for them."""
