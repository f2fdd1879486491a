"""`gpufn completion SHELL`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from gpufn.cli import COMPLETE, app
from gpufn.cli.terminal.command import Argument, Command


@click.command(cls=Command)
@click.argument(
    "shell", cls=Argument, type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL", help="Shell: bash, zsh or fish."
)
def completion(shell: str) -> None:
    """Print a shell script that completes commands, options and functions.

    bash: add `eval "$(gpufn completion bash)"` to ~/.bashrc. zsh: add `eval "$(gpufn completion zsh)"` to ~/.zshrc,
    after compinit. fish: write the script to ~/.config/fish/completions/gpufn.fish.
    """
    shell_class = get_completion_class(shell)
    assert shell_class is not None
    click.echo(shell_class(app, {}, "gpufn", COMPLETE).source(), nl=False)
