"""Dispatch: turns deliveries of a revision into attempts in workers' slots."""
