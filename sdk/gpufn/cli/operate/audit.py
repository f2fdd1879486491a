"""`gpufn audit ls`, `export`, `verify`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gpufn.cli.terminal.command import PATH, Command, Group, connect, json_option, limit_option
from gpufn.cli.terminal.output import WrongUsage, print_json, print_table, say, say_or_json
from gpufn_core.domain.audit import AuditRecord, ChainCheck
from gpufn_core.errors import GpufnError

if TYPE_CHECKING:
    from gpufn.client.client import Client

app = Group("audit", help="Show, export and verify the audit log.")

_PAGE = 1000
_LONGEST_OBJECT = 40  # columns; a digest is longer
_decode = msgspec.json.Decoder(AuditRecord).decode


class AuditLogBroken(GpufnError, code="audit_log_broken"):
    """The audit log was changed."""


@app.command("ls")
@click.option("--principal", help="Only records of this API key, by id or label; `local` for clients without keys.")
@click.option("--action", help="Only actions that contain this text, such as DELETE or /v1/keys.")
@click.option("--object", "object_", help="Only objects that contain this text, such as a function's name.")
@limit_option
@json_option
def list_records(principal: str | None, action: str | None, object_: str | None, limit: int, json: bool) -> None:
    """List the last actions and refusals: who did what, from where, with which result."""

    def is_wanted(record: AuditRecord) -> bool:
        return (
            (principal is None or principal in (record.principal, record.label))
            and (action is None or action in record.action)
            and (object_ is None or object_ in f"{record.object} {record.details.get('function', '')}")
        )

    with connect() as client:
        is_filtered = any(each is not None for each in (principal, action, object_))
        stored = _all(client, 0 if is_filtered else -limit)
        records = [record for record in map(_decode, stored) if is_wanted(record)][-limit:]
    if json:
        print_json(records)
        return
    rows = [
        (
            f"{datetime.datetime.fromtimestamp(record.at):%Y-%m-%d %H:%M:%S}",
            record.label or record.principal or "-",
            record.address,
            record.action,
            (record.object or record.details.get("function", ""))[:_LONGEST_OBJECT],
            f"{record.status} {record.code}".strip() + (f", {record.count} times" if record.count > 1 else ""),
        )
        for record in records
    ]
    print_table(("time", "who", "from", "action", "object", "result"), rows, empty="no records")


@app.command()
@click.option("--out", type=PATH, help="File to write. Default: standard output.")
def export(out: Path | None) -> None:
    """Write all records as JSON lines, as they are stored.

    `gpufn audit verify --file` checks such a file.
    """
    with connect() as client:
        lines = (bytes(record) for record in _all(client, 0))
        if out is None:
            for line in lines:
                say(line.decode())
            return
        with out.open("wb") as file:
            count = sum(bool(file.write(line + b"\n")) for line in lines)
    say(f"wrote {count:,} records to {out}")


@app.command(cls=Command)
@click.option("--file", type=PATH, help="Verify an exported file instead of the log of the gateway.")
@click.option("--head", help="Hash of a record that was noted earlier. The log must contain the record.")
@json_option
def verify(file: Path | None, head: str | None, json: bool) -> None:
    """Verify that no record was changed, removed or inserted.

    Note the hash that this command prints and keep it elsewhere: with `--head`, a later run proves that all records up
    to it are still the same. Without it, somebody with full access to the message bus could replace the whole log.
    """
    chain, has_head = ChainCheck(), False
    if file is None:
        with connect() as client:
            has_head = _check(chain, map(bytes, _all(client, 0)), head)
    else:
        try:
            has_head = _check(chain, file.read_bytes().splitlines(), head)
        except OSError as error:
            raise WrongUsage(f"cannot read {file}: {error.strerror}", field="--file") from error
    if chain.fault is not None:
        raise AuditLogBroken(f"record {chain.fault.seq}: {chain.fault.reason}")
    if head is not None and not has_head:
        raise AuditLogBroken(f"no record has the hash {head[:80]}: the log was replaced, or its retention has passed")
    first, last = chain.first, chain.last
    if first is None or last is None:
        say_or_json("no records", {"records": 0}, json=json)
        return
    text = f"{chain.count:,} records are intact, {first.seq} to {last.seq}; the last hash is {last.hash}"
    view = {"records": chain.count, "first": first.seq, "last": last.seq, "hash": last.hash}
    say_or_json(text, view, json=json)


def _check(chain: ChainCheck, stored: Iterator[bytes] | list[bytes], head: str | None) -> bool:
    """Add all records to `chain`. Return whether one has the hash `head`."""
    has_head = False
    for data in stored:
        try:
            record = _decode(data)
        except msgspec.MsgspecError as error:
            raise AuditLogBroken(f"after record {chain.count}: a record cannot be read: {error}") from error
        chain.add(record, data)
        has_head = has_head or (head is not None and record.hash == head)
    return has_head


def _all(client: Client, after: int) -> Iterator[msgspec.Raw]:
    """Yield the records after a number, or the last so many."""
    while (page := client.audit(after, _PAGE)).records:
        yield from page.records
        after = _decode(page.records[-1]).seq
        if page.head is not None and after >= page.head.seq:
            return
