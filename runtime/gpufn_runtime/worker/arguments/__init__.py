"""User code and its arguments: load the code, decode and validate the arguments of a call."""
