"""The platform on one machine: `gpufn up`, `down` and `doctor`, the supervisor and its nats-server."""
