"""Execution of calls: threads, event loop, batches and results."""
