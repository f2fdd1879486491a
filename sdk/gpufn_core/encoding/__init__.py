"""The encoding of arguments, results and exceptions as bytes."""
