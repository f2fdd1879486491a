"""Models in a worker: from an engine's folder to the session that its function calls. Loaded where there is one."""
