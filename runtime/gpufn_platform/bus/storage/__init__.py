"""JetStream storage: streams, key-value buckets and the object store."""
