"""Terminals: a command in its own worker, in the environment of a function (decision 0057)."""
