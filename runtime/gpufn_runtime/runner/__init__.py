"""One per node: pulls deliveries for the node's workers, hands them to slots, touches, settles."""
