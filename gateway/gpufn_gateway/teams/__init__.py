"""The use of teams, and the limit of their storage."""
