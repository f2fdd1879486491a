"""The node's cache: bundles, engines, weights and images."""
