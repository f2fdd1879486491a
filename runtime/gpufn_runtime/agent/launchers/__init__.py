"""Ways to create a worker process: in a container, forked from a template, or as a fresh interpreter."""
