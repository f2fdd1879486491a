"""How the CLI's groups of commands are made, so that all of them behave alike."""

from __future__ import annotations

from typing import Any

import typer


def new_app(**options: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )
