"""`gpufn signing keygen`, `trust`, `ls`, `rm`, `require`, `allow-unsigned`."""

from __future__ import annotations

from pathlib import Path

import click

from gpufn.cli.terminal.command import PATH, Argument, Group, connect, json_option, yes_option
from gpufn.cli.terminal.output import WrongUsage, ago, confirm, print_json, print_table, say, say_or_json
from gpufn.deploy.signing_key import signer_class

app = Group("signing", help="Make signing keys, trust and list them, and require signatures of deploys.")

_name_argument = click.argument("name", cls=Argument, help="Name of the key, such as alice or ci.")
_env_argument = click.argument("environment", cls=Argument, help="Environment, such as prod.")


@app.command()
@click.option("--out", type=PATH, default=Path("gpufn-signing.pem"), help="File of the private key.")
@json_option
def keygen(out: Path, json: bool) -> None:
    """Make a signing key: a private key for --sign, and beside it `.pub`, the public key to trust.

    No other user can read the private key. It has no password and never leaves this machine.
    """
    signer = signer_class().new()
    public = out.with_name(f"{out.name}.pub")
    try:
        signer.write(out)
        public.write_text(signer.public_pem())
    except FileExistsError:
        raise WrongUsage(f"{out} exists: choose another file", field="--out") from None
    except OSError as error:
        raise WrongUsage(f"cannot write {out}: {error.strerror}", field="--out") from error
    done = f"key {signer.id}: the private key is in {out}, the public key in {public}"
    say_or_json(done, {"id": signer.id, "private_key": str(out), "public_key": str(public)}, json=json)


@app.command()
@_name_argument
@click.option("--public-key", type=PATH, required=True, help="PEM file of the public key.")
@click.option(
    "--for", "patterns", multiple=True, help="Functions that it may sign, such as 'prod/*' or 'prod/search/predict'. "
    "Repeatable. Default: all.",
)  # fmt: skip
@json_option
def trust(name: str, public_key: Path, patterns: tuple[str, ...], json: bool) -> None:
    """Trust a public key. The key that had this name is replaced."""
    try:
        text = public_key.read_text(encoding="ascii")
    except OSError as error:
        raise WrongUsage(f"cannot read {public_key}: {error.strerror}", field="--public-key") from error
    except UnicodeDecodeError:
        raise WrongUsage(f"{public_key} is not a public key in PEM", field="--public-key") from None
    with connect() as client:
        key = client.trust_key(name, text, patterns or ("*",))
    say_or_json(f"{name} ({key.id}) may sign {', '.join(key.patterns)}", key, json=json)


@app.command("ls")
@json_option
def list_keys(json: bool) -> None:
    """List the trusted keys, and the environments that require signatures."""
    with connect() as client:
        signing = client.signing()
    if json:
        print_json(signing)
        return
    rows = [
        (key.name, key.id, ", ".join(key.patterns), ago(key.added_at), ", ".join(key.functions) or "-")
        for key in signing.keys
    ]
    header = ("name", "key", "may sign", "added", "signed")
    print_table(header, rows, empty="no trusted keys: see `gpufn signing trust --help`")
    say(f"signatures required in: {', '.join(signing.required) or 'no environment'}")


@app.command("rm")
@_name_argument
@yes_option
@json_option
def remove(name: str, yes: bool, json: bool) -> None:
    """Stop trusting a key.

    Workers that run go on. New workers of functions that it signed do not start until another key has signed them.
    """
    confirm(f"Stop trusting the key {name}?", yes=yes)
    with connect() as client:
        key = client.distrust_key(name)
    if key.functions:
        say(f"gpufn: warning: no new workers start for {', '.join(key.functions)}: deploy with another key", err=True)
    say_or_json(f"{name} is no longer trusted", key, json=json)


@app.command()
@_env_argument
@click.option("--force", is_flag=True, help="Even if functions of the environment could not start any more.")
@json_option
def require(environment: str, force: bool, json: bool) -> None:
    """Require signatures in an environment: its functions start only if a trusted key signed them."""
    with connect() as client:
        signing = client.require_signatures(environment, force=force)
    say_or_json(f"signatures are required in {', '.join(signing.required)}", signing, json=json)


@app.command("allow-unsigned")
@_env_argument
@json_option
def allow_unsigned(environment: str, json: bool) -> None:
    """Allow unsigned deploys in an environment again."""
    with connect() as client:
        signing = client.allow_unsigned(environment)
    say_or_json(f"signatures are required in {', '.join(signing.required) or 'no environment'}", signing, json=json)
