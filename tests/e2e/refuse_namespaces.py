"""Run a program without the right to create user namespaces, as Docker's default profile and Ubuntu's AppArmor do:
``python refuse_namespaces.py PROGRAM ...``."""

from __future__ import annotations

import os
import struct
import sys

from gpufn_platform.sandbox import seccomp, system_calls

UNSHARE = seccomp.SETUP_CALLS[os.uname().machine]["unshare"]
REFUSE_UNSHARE = [
    (0x20, 0, 0, 0),  # load the number of the call
    (0x15, 0, 1, UNSHARE),
    (0x06, 0, 0, 0x00050001),  # EPERM
    (0x06, 0, 0, 0x7FFF0000),  # allowed
]


def refuse_namespaces() -> None:
    system_calls.set_no_new_privileges()
    system_calls.set_seccomp_filter(b"".join(struct.pack("HBBI", *step) for step in REFUSE_UNSHARE))


if __name__ == "__main__":
    refuse_namespaces()
    os.execv(sys.argv[1], sys.argv[1:])
