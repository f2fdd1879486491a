"""OpenFaaS: raw bodies to functions, now and later, with callbacks."""
