"""The node's cache: bundles, engines and images."""
