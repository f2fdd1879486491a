"""SELinux labels of folders that containers mount.

Where SELinux is enforced, a container reaches only files of certain types. Docker's structured mounts have no option
`z`, so the agent sets the type. It sets the range s0, which all containers may use, because a folder is created before
its container has a range. Files that are created in a labelled folder inherit its label.

The program sets the label, because a process in a container sees SELinux as disabled unless /sys/fs/selinux is mounted
writable. Source: NVIDIA/k8s-device-plugin, pull request 847, which labels MPS's pipe folder in the same way.
"""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

log = logging.getLogger(__name__)

ENFORCE = Path("/sys/fs/selinux/enforce")
_CHCON = ("chcon", "-R", "-t", "container_file_t", "-l", "s0", "--")
_TIMEOUT_S = 60.0


def label_for_containers(*folders: Path) -> None:
    """Label the existing ones of these folders and their content, if SELinux is enforced. May block."""
    present = [os.fspath(folder) for folder in folders if folder.exists()]
    if not present or not _is_enforced():
        return
    try:
        result = subprocess.run(  # noqa: S603
            [*_CHCON, *present],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        problem = result.stderr.strip() if result.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        log.warning("SELinux may keep containers out of %s: %s", ", ".join(present), problem)


def _is_enforced() -> bool:
    try:
        return ENFORCE.read_text().strip() == "1"
    except OSError:  # a kernel without SELinux
        return False
