"""Signatures of deploys: what is signed, the keys, and the rules of trust."""
