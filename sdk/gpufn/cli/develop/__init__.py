"""Commands for the time before a deploy: run, serve, init, diff."""
