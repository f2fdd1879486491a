"""Commands that deploy, show and change functions."""
