"""The modules that a function imports: collected for its bundle, guarded, and missing ones reported."""
