"""`gpufn secrets set`, `ls`, `rm`, `rotate`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from gpufn.cli.terminal.command import PATH, Argument, Group, connect, json_option, yes_option
from gpufn.cli.terminal.output import WrongUsage, ago, confirm, print_json, print_table, say_or_json
from gpufn_core.spec.naming.patterns import ALL
from gpufn_core.spec.naming.secret_scopes import scope_of

_Command = TypeVar("_Command", bound=Callable[..., Any])

app = Group("secrets", help="Set, list and delete secrets, and rotate their master key.")

_name_argument = click.argument("name", cls=Argument, help="Name of the secret: the environment variable, as HF_TOKEN.")

_SCOPE: Final = (
    click.option("--env", default="", help="Only for the functions of this environment. Default: for every function."),
    click.option("--app", "app_", default="", help="Only for the functions of this app; needs --env."),
)


def _scope_options(command: _Command) -> _Command:
    for option in reversed(_SCOPE):
        command = option(command)
    return command


@app.command("set")
@_name_argument
@_scope_options
@click.option("--file", type=PATH, help="File with the value. Default: standard input.")
@json_option
def set_(name: str, env: str, app_: str, file: Path | None, json: bool) -> None:
    """Set a secret, or change its value.

    The value is read from standard input, without the newline at its end, or from a file as it is. It is never an
    argument, which other users of the machine could see. A function gets the secret of its app, else the secret of its
    environment, else the one for every function. Functions that get this one are given new workers with the new value;
    no call is lost.
    """
    scope = scope_of(env, app_)
    value = _read(name, file)
    with connect() as client:
        secret = client.set_secret(name, value, env=env, app=app_)
    used_by = f"; new workers start for {', '.join(secret.functions)}" if secret.functions else ""
    say_or_json(f"secret {name} for {_functions(scope)}, version {secret.version}{used_by}", secret, json=json)


@app.command("ls")
@json_option
def list_secrets(json: bool) -> None:
    """List the secrets for functions that the key may read, without their values."""
    with connect() as client:
        secrets = client.secrets()
    if json:
        print_json(secrets)
        return
    rows = [
        (
            each.name,
            _functions(each.scope),
            str(each.version),
            ago(each.updated_at),
            ", ".join(each.functions) or "-",
        )
        for each in secrets
    ]
    print_table(
        ("name", "for", "version", "updated", "used by"), rows, empty="no secrets: see `gpufn secrets set --help`"
    )


@app.command("rm")
@_name_argument
@_scope_options
@yes_option
@json_option
def remove(name: str, env: str, app_: str, yes: bool, json: bool) -> None:
    """Delete a secret.

    Its functions get the next wider secret of the name, if they were deployed with a right to that. A secret that a
    function could not replace stays.
    """
    scope = scope_of(env, app_)
    confirm(f"Delete the secret {name} for {_functions(scope)}?", yes=yes)
    with connect() as client:
        client.delete_secret(name, env=env, app=app_)
    say_or_json(f"deleted secret {name} for {_functions(scope)}", {"deleted": name, "scope": scope}, json=json)


@app.command()
@json_option
def rotate(json: bool) -> None:
    """Rotate the master key: encrypt all secrets under a new one.

    If the master key is in a file of the only host, the gateway makes the new key. Otherwise put the new key before the
    old one, on each host, then run this command; then remove the old key. Values and workers do not change.
    """
    with connect() as client:
        count = client.rotate_master_key()
    done = f"{count} secret{'s are' if count != 1 else ' is'} encrypted under the new master key"
    say_or_json(done, {"encrypted": count}, json=json)


def _functions(scope: str) -> str:
    """Describe the functions that a secret is for."""
    return "all functions" if scope == ALL else scope


def _read(name: str, file: Path | None) -> str:
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        if sys.stdin.isatty():
            return str(click.prompt(f"Value of {name}", hide_input=True))
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except OSError as error:
        raise WrongUsage(f"cannot read {file}: {error.strerror}", field="--file") from error
    except UnicodeDecodeError:
        raise WrongUsage("the value is not UTF-8 text: encode it, for example in base64") from None
