"""Functions that are sent by value: in a notebook, in `__main__`, and closures."""
