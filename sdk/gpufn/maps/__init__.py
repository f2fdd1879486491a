"""`Function.map`: one function over many items."""
