"""Metrics for Prometheus: the catalogue of all series, and the code that fills them at a scrape."""
