"""Streams in both directions between a client and a worker: web requests, terminals, and their flow control."""
