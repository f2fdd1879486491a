"""Ends of attempts: the reply or the record, retries, notes of starts, and usage. Their states are in `core`."""
