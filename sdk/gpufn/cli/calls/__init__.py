"""Commands that call functions, and list, follow and cancel calls."""
