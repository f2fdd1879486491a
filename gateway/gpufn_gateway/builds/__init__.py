"""Builds of models, and the activation of revisions that wait for them."""
