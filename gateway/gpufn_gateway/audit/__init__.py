"""The audit log: the principal, action, source and result of each change."""
