"""The gateway: HTTP in, invocations out. `gpufn_gateway.__main__` puts it together."""
