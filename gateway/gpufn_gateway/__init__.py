"""The gateway: it accepts HTTP requests and queues invocations. `gpufn_gateway.__main__` builds its objects."""
