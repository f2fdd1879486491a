"""User code and its arguments: load the code, decode and validate a call's arguments."""
