"""Commands for models, their builds and their engines."""
