"""Functions and revisions: deploys, and the in-memory registry."""
