"""How many workers each revision gets, and when calls move to the next one. Pure."""
