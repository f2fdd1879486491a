"""Maps: accept items in chunks and serve their outcomes."""
