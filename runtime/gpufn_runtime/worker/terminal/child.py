"""Program that becomes the command of a terminal: `python -IS child.py tty|pipes [PROGRAM [ARGUMENT ...]]`.

It runs in its own process, because code between fork and exec is not safe in a worker, which has threads. Without a
program it becomes a shell. The exit codes for a program that cannot run are a shell's exit codes.
"""

import fcntl
import os
import signal
import sys
import termios

SHELLS = ("bash", "sh")
NOT_FOUND = 127
NOT_EXECUTABLE = 126


def main(kind: str, *command: str) -> int:
    if kind == "tty":
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C becomes a signal, and the end of the terminal SIGHUP
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for arguments in [command] if command else [(shell,) for shell in SHELLS]:
        try:
            os.execvp(arguments[0], arguments)  # noqa: S606  the user's own command
        except FileNotFoundError:
            problem, code = "there is no such program here", NOT_FOUND
        except OSError as error:
            problem, code = error.strerror or str(error), NOT_EXECUTABLE
            break
    sys.stderr.write(f"gpufn exec: {arguments[0]}: {problem}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
