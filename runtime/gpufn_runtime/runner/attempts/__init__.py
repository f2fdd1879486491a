"""Attempts: their life, their end, their settlement and their cost."""
