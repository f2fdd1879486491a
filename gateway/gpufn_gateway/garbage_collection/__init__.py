"""Removal of revisions, bundles, models, engines and stored arguments that nothing uses."""
