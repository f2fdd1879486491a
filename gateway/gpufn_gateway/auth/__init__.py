"""Authentication, authorization and the limits of API keys."""
