"""The gateway: it accepts HTTP requests and queues invocations. `gpufn_gateway.composition` builds its objects."""
