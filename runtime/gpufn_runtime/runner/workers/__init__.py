"""Connections to workers: sockets, slots, output and nested calls."""
