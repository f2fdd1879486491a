"""Origins of weights, and the format of their files: URLs, signatures and layouts, without network access."""
