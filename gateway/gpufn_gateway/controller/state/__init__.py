"""The controller's state: the world as reported, and the leases."""
