"""Arguments of calls from JSON, forms and query strings, checked against the signature."""
