"""The workers of this node: start, supervision, adoption and cleanup."""
