"""Terminals: a command in a worker of its own, in the environment of a function (decision 0057)."""
