"""What teams use and keep, and the limit of what they keep."""
