"""History of functions, nodes and GPUs: recorded by every gateway, published by the leader, kept by every gateway.

    reports → Collector → a block of ten seconds → the stream HISTORY → Index (SQLite) → GET /v1/history

The stream is the record. The index of a gateway is a copy that answers queries: it can be deleted at any time.
"""
