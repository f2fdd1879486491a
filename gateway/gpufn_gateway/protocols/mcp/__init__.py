"""The Model Context Protocol: functions as tools of a language model."""
