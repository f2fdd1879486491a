"""The library that all platform processes share: the bus, the call queues, and process support."""
