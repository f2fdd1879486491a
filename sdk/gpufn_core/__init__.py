"""The contract that the SDK and all platform processes share.

It does no network I/O and imports no other package of gpufn.
"""
