"""Functions that are sent by value: those of a notebook, of `__main__`, and closures."""
