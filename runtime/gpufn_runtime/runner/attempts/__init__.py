"""Attempts: state, end, settlement and cost."""
