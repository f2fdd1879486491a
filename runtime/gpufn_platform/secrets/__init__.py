"""Secrets of functions: their encryption, their master key, and their redaction in output and errors."""
