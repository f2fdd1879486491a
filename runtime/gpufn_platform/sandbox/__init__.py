"""Sandbox of a process that runs user code. `layout` and `seccomp` are pure; the other modules make system calls."""
