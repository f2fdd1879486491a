"""`gpufn completion SHELL`."""

from __future__ import annotations

import enum
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from gpufn.cli import COMPLETE


class Shell(enum.StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="For which shell.")]) -> None:
    """Print what makes a shell complete commands, options and functions.

    bash: add `eval "$(gpufn completion bash)"` to ~/.bashrc. zsh: the same with zsh to ~/.zshrc, behind compinit. fish:
    write it to ~/.config/fish/completions/gpufn.fish.
    """
    wanted = {"prog_name": "gpufn", "complete_var": COMPLETE, "shell": shell.value}  # the shell's name: none is run
    typer.echo(get_completion_script(**wanted))
