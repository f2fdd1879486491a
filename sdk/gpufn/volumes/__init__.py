"""Copies of files to and from volumes."""
