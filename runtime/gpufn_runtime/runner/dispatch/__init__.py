"""Dispatch: deliveries of one revision in, attempts in workers' slots out."""
