"""The HTTP interface, one module per kind of resource. The hot path, invoke, is `gpufn_gateway.routes.invoke`."""
