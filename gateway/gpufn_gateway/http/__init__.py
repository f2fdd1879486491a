"""HTTP: connections (`connection/`), request bodies and responses."""
