"""Costs of functions: prices from a file, usage from the runners' records, held time from the history."""
