"""Python environments of this node: made once per lock, shared by functions, read-only for workers."""
