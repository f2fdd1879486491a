"""Checks of an engine: samples, the reference run, tolerances and measurements."""
