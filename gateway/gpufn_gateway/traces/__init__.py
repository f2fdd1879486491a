"""Traces: which calls are traced, their spans in memory (`GET /v1/traces`), and their way to a collector.

`tracing` decides and records calls of this gateway's clients. All processes publish their spans on the bus; `receiver`
takes them from there, its own included, into the `store` and the `exporter`.
"""
