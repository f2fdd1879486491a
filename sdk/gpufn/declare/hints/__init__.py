"""Type hints of parameters: their meaning, their JSON Schema, and checks of arguments."""
