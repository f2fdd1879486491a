"""The objects that the platform stores or reports: revisions, invocations, workers, devices and engines."""
