"""Models in, verified engines out: nothing here yet."""
