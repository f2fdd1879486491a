"""The decisions of the agent. Pure."""
