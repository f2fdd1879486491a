"""The export to a collector, as OTLP over HTTP: spans, and log lines of functions.

`exporter` has the queue and the thread; `spans` and `logs` send a batch by OpenTelemetry's library, which is imported
there only. `log_export` takes log lines from the bus.
"""
