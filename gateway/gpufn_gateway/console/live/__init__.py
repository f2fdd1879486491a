"""Live data of the console's pages."""
