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


def completion(shell: Annotated[Shell, typer.Argument(help="Shell: bash, zsh or fish.")]) -> None:
    """Print a shell script that completes commands, options and functions.

    bash: add `eval "$(gpufn completion bash)"` to ~/.bashrc. zsh: add `eval "$(gpufn completion zsh)"` to ~/.zshrc,
    after compinit. fish: write the script to ~/.config/fish/completions/gpufn.fish.
    """
    options = {"prog_name": "gpufn", "complete_var": COMPLETE, "shell": shell.value}  # `shell` is not a command to run
    typer.echo(get_completion_script(**options))
