"""Function declarations: the decorator, its options, and the schema of a signature."""
