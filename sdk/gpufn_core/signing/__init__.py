"""Signatures of deploys: the signed fields, the keys, and the rules of trust."""
