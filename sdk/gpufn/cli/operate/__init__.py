"""Commands for operators: nodes, devices and API keys."""
