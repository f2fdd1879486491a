"""The HTTP API, one module per kind of resource. The hot path, invoke, is `gpufn_gateway.routes.calls.invoke`."""
