"""The specification of a function: values that a user chooses, frozen and validated."""
