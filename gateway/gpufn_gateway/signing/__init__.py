"""The keys that may sign deploys, and the environments that require signatures."""
