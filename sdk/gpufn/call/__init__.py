"""Remote calls: `.remote`, `.spawn` and `.stream`, graphs of calls, and the context inside a call."""
