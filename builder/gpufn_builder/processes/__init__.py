"""The processes of a build, which may crash, hang or run out of memory."""
