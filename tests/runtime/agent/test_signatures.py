"""An agent starts nothing, and unpacks nothing, that no trusted key signed."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.revision import Revision
from gpufn_core.ids import digest_of
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.signing.ed25519 import Signer, key_id, parse_public_key
from gpufn_core.signing.statement import Statement
from gpufn_core.signing.trust import TrustedKey
from gpufn_platform.signing.local_trust import FILE, MODE, LocalTrust
from gpufn_platform.signing.signatures import KEYS, REQUIRED

SIGNER, OTHER = Signer.new(), Signer.new()


async def trust(node: Any, pattern: str = "*", signer: Signer = SIGNER) -> None:
    public = parse_public_key(signer.public_pem())
    key = TrustedKey(name="ci", id=key_id(public), public_key=public, patterns=(pattern,))
    await node.signing.put(f"{KEYS}ci", encode(key))


async def require(node: Any) -> None:
    await node.signing.put(f"{REQUIRED}default", b"")


async def sign(node: Any, revision: Revision, signer: Signer = SIGNER, **changes: Any) -> None:
    """Store a signed revision; `changes` are made after it was signed."""
    signature = signer.sign(Statement.of(revision.function, revision.spec, revision.bundle, 1.0))
    stored = msgspec.structs.replace(revision, signature=signature, **changes)
    await node.revisions.put(subjects.revision_key(revision.function, revision.number), encode(stored))


async def refusal(node: Any) -> str:
    event = await node.event(await node.assign(), "start_failed")
    assert not list(node.home.bundles.glob("*/*"))
    code: str = event.failure.error.code
    return code


def test_a_signed_revision_starts_where_signatures_are_required(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await require(node)
        await trust(node, node.function)
        await sign(node, await node.deploy())
        await node.start()
        await node.event(await node.assign(), "started")

    on_node(run)


@pytest.mark.parametrize("case", ["unsigned", "unknown key", "other pattern", "other spec", "swapped"])
def test_code_without_a_trusted_signature_is_neither_unpacked_nor_started(on_node: Any, case: str) -> None:
    async def run(node: Any) -> None:
        await require(node)
        await trust(node, "prod/*" if case == "other pattern" else "*")
        revision = await node.deploy()
        if case == "swapped":
            renamed = msgspec.structs.replace(revision.spec, name="another")
            signature = SIGNER.sign(Statement.of("another", renamed, revision.bundle, 1.0))
            stored = msgspec.structs.replace(revision, signature=signature)
            await node.revisions.put(subjects.revision_key(node.function, 1), encode(stored))
        elif case == "other spec":
            spec = msgspec.structs.replace(revision.spec, env={**revision.spec.env, "PYTHONPATH": "/evil"})
            await sign(node, revision, spec=spec)
        elif case != "unsigned":
            await sign(node, revision, OTHER if case == "unknown key" else SIGNER)
        await node.start(templates=1)
        assert await refusal(node) == "untrusted_deploy"
        assert node.fetches == 0

    on_node(run)


def test_a_record_under_another_functions_name_does_not_start(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await trust(node)
        revision = await node.deploy()
        other = msgspec.structs.replace(
            revision, function="another", spec=msgspec.structs.replace(revision.spec, name="another")
        )
        signature = SIGNER.sign(Statement.of("another", other.spec, other.bundle, 1.0))
        signed = msgspec.structs.replace(other, signature=signature)
        await node.revisions.put(subjects.revision_key(node.function, 1), encode(signed))
        await node.start()
        assert await refusal(node) == "untrusted_deploy"

    on_node(run)


def test_a_tampered_bundle_in_the_store_does_not_start(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await trust(node)
        revision = await node.deploy()
        await sign(node, revision)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("app.py", "evil = 1")
        node.bundles[revision.bundle] = buffer.getvalue()
        await node.start()
        assert await refusal(node) == "artifact_unavailable"
        node.bundles[digest_of(buffer.getvalue())] = buffer.getvalue()
        await sign(node, revision, bundle=digest_of(buffer.getvalue()))
        node.events.clear()
        assert await refusal(node) == "untrusted_deploy"

    on_node(run)


def test_workers_of_a_revoked_key_go_on_and_no_new_ones_start(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await trust(node)
        await sign(node, await node.deploy())
        await node.start()
        first = await node.assign()
        await node.event(first, "started")
        await node.signing.delete(f"{KEYS}ci")
        event = await node.event(await node.assign(), "start_failed")
        assert event.failure.error.code == "untrusted_deploy"
        assert first in await node.assigned()
        await trust(node)
        await node.event(await node.assign(), "started")

    on_node(run)


@pytest.mark.parametrize(
    ("mode", "kind"), [("off", "started"), ("policy", "start_failed"), ("require", "start_failed")]
)
def test_the_settings_of_a_node_decide_whether_a_signature_is_checked(on_node: Any, mode: str, kind: str) -> None:
    async def run(node: Any) -> None:
        if mode == "policy":
            await require(node)
        node.local_trust = LocalTrust.from_env({MODE: mode})
        await node.deploy()
        await node.start()
        await node.event(await node.assign(), kind)

    on_node(run)


def test_a_key_that_only_the_bus_trusts_counts_for_nothing_on_a_node_with_its_own_keys(
    on_node: Any, tmp_path: Path
) -> None:
    """A gateway in wrong hands can write any record."""
    path = tmp_path / "trusted.toml"
    path.write_text(f'require = ["default"]\n[keys.ci]\npublic_key = """\n{SIGNER.public_pem()}"""\n')

    async def run(node: Any) -> None:
        node.local_trust = LocalTrust.from_env({FILE: str(path)})
        await trust(node, signer=OTHER)
        revision = await node.deploy()
        await sign(node, revision, OTHER)
        await node.start()
        assert await refusal(node) == "untrusted_deploy"
        await sign(node, revision)
        await node.event(await node.assign(), "started")

    on_node(run)
