"""Runner, one per node: pulls deliveries for the node's workers, runs and settles them, and extends their leases."""
