"""Names of functions, apps and variants, and patterns of names."""
