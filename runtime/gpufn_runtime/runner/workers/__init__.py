"""Workers as the runner sees them: sockets, slots, output and nested calls."""
