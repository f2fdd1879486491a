"""The contract between gpufn's processes: names on the bus, messages, frames and their encoding."""
