"""Commands about volumes, dicts and queues."""
