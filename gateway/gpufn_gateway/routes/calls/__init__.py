"""Routes of calls: invoke, submit, map, and their outcomes."""
