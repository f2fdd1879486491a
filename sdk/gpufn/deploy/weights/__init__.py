"""Files of weights at deploy: from a local path, a hub or a bucket."""
