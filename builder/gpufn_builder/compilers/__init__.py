"""Compilers: each makes an engine of one backend, and runs it so that it can be checked and measured."""
