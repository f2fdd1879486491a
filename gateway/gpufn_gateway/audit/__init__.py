"""The audit log: which principal did what, from where, with which result."""
