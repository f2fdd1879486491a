"""Worker processes of this node: start, supervision, adoption and cleanup."""
