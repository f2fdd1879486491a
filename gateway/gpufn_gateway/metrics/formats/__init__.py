"""The formats of `/metrics`: which one a client gets, and how each is written."""
