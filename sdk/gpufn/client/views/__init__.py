"""Typed responses of the gateway. Fields that a newer gateway adds are ignored."""
