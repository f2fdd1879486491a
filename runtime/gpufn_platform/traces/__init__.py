"""Traces: finished spans of this process, published to the gateways."""
