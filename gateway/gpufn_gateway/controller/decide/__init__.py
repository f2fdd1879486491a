"""The decisions of one controller step. Pure."""
