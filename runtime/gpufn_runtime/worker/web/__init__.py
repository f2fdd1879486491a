"""Web applications in a worker: sessions, and the ASGI interface to them."""
