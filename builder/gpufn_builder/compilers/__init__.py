"""Compilers: each builds engines of one backend, and loads them for verification and measurement."""
