"""RunPod's serverless API, version 2: jobs of an endpoint, which is a function."""
