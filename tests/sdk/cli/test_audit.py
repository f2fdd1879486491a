"""`gpufn audit`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpufn_core.domain.audit import START, AuditRecord
from tests.sdk.cli.commands import command
from tests.sdk.conftest import StubGateway


def records(count: int = 3) -> list[AuditRecord]:
    chain: list[AuditRecord] = []
    for seq in range(1, count + 1):
        chain.append(
            AuditRecord(
                seq=seq, at=1e9 + seq, principal="k1", label="ci", address="10.0.0.7", object=f"f{seq}", status=204,
                action="DELETE /v1/functions/{fn}", previous=chain[-1].hash if chain else START,
            )
        )  # fmt: skip
    return chain


def serve(gateway: StubGateway, chain: list[AuditRecord]) -> None:
    head = {"seq": chain[-1].seq, "hash": chain[-1].hash, "at": 1.0}
    page = {"records": [msgspec.Raw(record.canonical()) for record in chain], "head": head}
    gateway.answers.clear()
    gateway.on("GET /v1/audit", msgspec.json.encode(page))


def test_records_are_listed_and_filtered(gateway: StubGateway) -> None:
    serve(gateway, records())
    lines = command("audit", "ls").stdout.splitlines()
    assert len(lines) == 4
    assert {"ci", "10.0.0.7", "f3", "204"} <= set(lines[-1].split())
    assert len(command("audit", "ls", "--object", "f2", "--principal", "ci").stdout.splitlines()) == 2


@pytest.mark.parametrize("source", ["gateway", "file"])
def test_a_change_anywhere_is_an_error(gateway: StubGateway, tmp_path: Path, source: str) -> None:
    def verify(chain: list[AuditRecord], *options: str) -> tuple[int, str]:
        if source == "gateway":
            serve(gateway, chain)
            result = command("audit", "verify", *options)
        else:
            file = tmp_path / "audit.jsonl"
            file.write_bytes(b"".join(record.canonical() + b"\n" for record in chain))
            result = command("audit", "verify", "--file", str(file), *options)
        return result.exit_code, result.stdout + result.stderr

    chain = records()
    code, text = verify(chain)
    assert code == 0
    assert chain[-1].hash in text
    assert verify(chain, "--head", chain[1].hash)[0] == 0
    changed = [chain[0], msgspec.structs.replace(chain[1], object="other"), chain[2]]
    assert verify(changed)[0] == 1
    assert verify([chain[0], chain[2]])[0] == 1
    forged = records(2)  # a log that was replaced is intact, but lacks the record that was noted
    assert verify(forged)[0] == 0
    code, text = verify(forged, "--head", chain[2].hash)
    assert (code, "replaced" in text) == (1, True)


def test_an_export_can_be_verified(gateway: StubGateway, tmp_path: Path) -> None:
    serve(gateway, records())
    out = tmp_path / "audit.jsonl"
    assert command("audit", "export", "--out", str(out)).exit_code == 0
    assert out.read_bytes().splitlines() == [record.canonical() for record in records()]
    assert command("audit", "verify", "--file", str(out)).exit_code == 0
