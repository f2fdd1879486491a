"""The store of the files of volumes: the bus, or a bucket of an S3 store."""
