"""Maps: chunks of items in, outcomes out."""
