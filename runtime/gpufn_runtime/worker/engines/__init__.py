"""Models in a worker: from an engine's folder to the session that a function calls. Imported only if there are
models."""
