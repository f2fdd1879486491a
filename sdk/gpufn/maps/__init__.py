"""`Function.map`: calls of one function for many items."""
