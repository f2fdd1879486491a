"""The signed statement: one form for one deploy, and another for every change of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn_core.domain.devices.engine import Build
from gpufn_core.domain.revision import Revision, Variant
from gpufn_core.errors import UntrustedDeploy
from gpufn_core.ids import Digest, digest_of
from gpufn_core.protocol.codec import encode
from gpufn_core.signing.ed25519 import Signer, key_id, parse_public_key
from gpufn_core.signing.statement import DeploySignature, Statement, decode_statement, signed_bytes, spec_digest
from gpufn_core.signing.trust import Trust, TrustedKey, check_build, check_revision
from gpufn_core.spec.function_spec import (
    Batch,
    EntryPoint,
    FunctionSpec,
    MethodSpec,
    Packaging,
    Retry,
    Serves,
    spec_from_json,
)
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.isolation import Isolation, Network
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_core.spec.naming.variant_options import apply
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.schedule import Schedule
from gpufn_core.spec.terminal_spec import terminal_spec
from gpufn_core.spec.volume_spec import VolumeMount
from gpufn_core.spec.web_spec import WebKind, WebSpec
from gpufn_core.spec.weights_spec import WeightsFile, WeightsSpec

NAME = "prod/search/predict"
SIGNER, OTHER = Signer.new(), Signer.new()
BUNDLE = digest_of(b"bundle")
MODEL = ModelSpec(parameter="net", files=(ModelFile("m.onnx", digest_of(b"m"), 1),))
SPEC = FunctionSpec(
    name=NAME,
    entry=EntryPoint("app", "predict"),
    methods=(MethodSpec(parameters={"type": "object", "properties": {"b": {}, "a": {"default": 1.5}}}),),
    env={"B": "1", "A": "2"},
    secrets=("TOKEN",),
    models=(MODEL,),
    weights=(WeightsSpec(source="./w", files=(WeightsFile("w", 1, digest_of(b"w")),)),),
)


def trusted(signer: Signer, *patterns: str) -> TrustedKey:
    public = parse_public_key(signer.public_pem())
    return TrustedKey(name="ci", id=key_id(public), public_key=public, patterns=patterns)


TRUST = Trust(keys=(trusted(SIGNER, "prod/*"),), required=frozenset({"prod"}))


def signed(spec: FunctionSpec = SPEC, signer: Signer = SIGNER) -> DeploySignature:
    return signer.sign(Statement.of(spec.name, spec, BUNDLE, 1.5))


def revision(signature: DeploySignature | None, spec: FunctionSpec = SPEC, bundle: Digest = BUNDLE) -> Revision:
    return Revision(function=spec.name, number=3, spec=spec, bundle=bundle, created_at=1.0, signature=signature)


def is_trusted(revision: Revision, trust: Trust = TRUST) -> bool:
    try:
        check_revision(trust, revision.function, revision)
    except UntrustedDeploy:
        return False
    return True


def test_a_copy_of_a_signed_revision_with_another_number_and_time_is_trusted() -> None:
    original = revision(signed())
    assert is_trusted(original)
    assert is_trusted(msgspec.structs.replace(original, number=9, created_at=7.0, deploy_id="x"))
    assert is_trusted(msgspec.msgpack.decode(encode(original), type=Revision))


def test_the_digest_of_a_spec_is_the_same_in_each_encoding() -> None:
    as_json = spec_from_json(msgspec.json.encode(SPEC))
    as_msgpack = msgspec.msgpack.decode(encode(as_json), type=FunctionSpec)
    assert spec_digest(SPEC) == spec_digest(as_json) == spec_digest(as_msgpack)


def test_the_digest_of_a_spec_stays_the_same_in_later_releases() -> None:
    """A changed digest means that signatures of earlier releases are refused: a default or a field has changed."""
    assert spec_digest(SPEC) == "8ef4d992db5dcaa3d828914b8a9382b159f79aba0f72a36ae76564d02a7ec268"


_OTHER_VALUES: dict[str, object] = {
    "name": "prod/search/other",
    "entry": EntryPoint("app", "other"),
    "methods": (MethodSpec(parameters={"type": "object", "properties": {"a": {"default": 1.5}, "b": {}}}),),
    "is_class": True,
    "resources": Resources(cpu=2.0),
    "scaling": msgspec.structs.replace(SPEC.scaling, max_workers=9),
    "concurrency": 2,
    "batch": Batch(2),
    "timeout_s": 1.0,
    "startup_timeout_s": 1.0,
    "queue_timeout_s": 1.0,
    "webhook": "https://example.com/",
    "retention_s": 60.0,
    "env": {"A": "2", "B": "1"},
    "secrets": ("OTHER",),
    "python": "3.12",
    "models": (msgspec.structs.replace(MODEL, max_batch=2),),
    "weights": (),
    "image": ImageSpec(python="3.12"),
    "egress": True,
    "pickle": True,
    "modules": ("numpy",),
    "retries": Retry(1),
    "priority": Priority.HI,
    "schedule": Schedule("0 6 * * *"),
    "isolation": Isolation.CONTAINER,
    "network": Network.NONE,
    "max_calls": 10,
    "serves": Serves.OPENAI_CHAT,
    "constructor": {"type": "object", "properties": {"size": {"type": "string"}}},
    "max_variants": 3,
    "web": WebSpec(WebKind.ASGI),
    "volumes": (VolumeMount("models"),),
}


def test_every_field_of_a_spec_is_tried() -> None:
    assert _OTHER_VALUES.keys() == set(FunctionSpec.__struct_fields__)


@pytest.mark.parametrize("field", sorted(_OTHER_VALUES))
def test_a_signature_cannot_be_moved_to_another_spec(field: str) -> None:
    other = msgspec.structs.replace(SPEC)
    msgspec.structs.force_setattr(other, field, _OTHER_VALUES[field])
    assert spec_digest(other) != spec_digest(SPEC)
    assert not is_trusted(revision(signed(), other))


def test_a_variant_is_trusted_as_its_function() -> None:
    assert is_trusted(msgspec.structs.replace(revision(signed()), function=f"{NAME}=0123456789"))


def test_a_terminal_is_trusted_as_its_function_except_where_signatures_are_required() -> None:
    variant = Variant(3, original=SPEC, is_terminal=True)
    terminal = msgspec.structs.replace(
        revision(signed(), terminal_spec(SPEC)), function=f"{NAME}=0123456789", variant=variant
    )
    optional = msgspec.structs.replace(TRUST, required=frozenset())
    assert is_trusted(terminal, optional)
    assert not is_trusted(msgspec.structs.replace(terminal, spec=SPEC), optional)
    assert not is_trusted(msgspec.structs.replace(terminal, variant=Variant(3, original=SPEC)), optional)
    assert not is_trusted(terminal)


def test_a_variant_may_change_only_the_options_that_it_names() -> None:
    options = {"cpu": 2}
    variant = Variant(3, options=options, original=SPEC)
    changed = msgspec.structs.replace(
        revision(signed(), apply(SPEC, options)), function=f"{NAME}=0123456789", variant=variant
    )
    assert is_trusted(changed)
    assert not is_trusted(msgspec.structs.replace(changed, variant=None))
    other = msgspec.structs.replace(changed.spec, env={"A": "3"})
    assert not is_trusted(msgspec.structs.replace(changed, spec=other))


def test_a_signature_cannot_be_moved_to_another_bundle_or_function() -> None:
    assert not is_trusted(revision(signed(), bundle=digest_of(b"other")))
    moved = msgspec.structs.replace(revision(signed()), function="prod/search/other")
    assert not is_trusted(moved)


@given(data=st.data())
def test_no_changed_byte_of_a_signature_is_trusted(data: st.DataObject) -> None:
    signature = signed()
    field = data.draw(st.sampled_from(["payload", "value"]))
    value = bytearray(getattr(signature, field))
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] ^= data.draw(st.integers(1, 255))
    assert not is_trusted(revision(msgspec.structs.replace(signature, **{field: bytes(value)})))


_VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)


@given(
    env=st.dictionaries(st.from_regex(r"A[A-Z]{0,3}", fullmatch=True), _VALUES, max_size=4),
    timeout_s=st.floats(0.001, 1000.0),
    bundle=st.binary(max_size=3).map(digest_of),
)
def test_only_the_signed_deploy_is_trusted(env: dict[str, str], timeout_s: float, bundle: Digest) -> None:
    spec = msgspec.structs.replace(SPEC, env=env, timeout_s=timeout_s)
    signature = SIGNER.sign(Statement.of(NAME, spec, bundle, 2.0))
    assert is_trusted(revision(signature, spec, bundle))
    assert is_trusted(revision(signature)) == (list(env.items()) == list(SPEC.env.items()) and bundle == BUNDLE
                                               and timeout_s == SPEC.timeout_s)  # fmt: skip


def test_the_payload_is_bound_to_its_type() -> None:
    raw = SIGNER._key.sign(signed().payload)
    assert not is_trusted(revision(msgspec.structs.replace(signed(), value=raw)))
    assert signed_bytes(b"") != signed_bytes(b" ")
    assert decode_statement(signed().payload) == Statement.of(NAME, SPEC, BUNDLE, 1.5)


@pytest.mark.parametrize(
    ("signature", "trust", "expected"),
    [
        (None, TRUST, False),
        (None, Trust(required=frozenset({"dev"})), True),
        (None, Trust(requires_all=True), False),
        (signed(), TRUST, True),
        (signed(signer=OTHER), TRUST, False),
        (signed(signer=OTHER), Trust(), False),  # a signature is always checked
        (signed(), Trust(keys=(trusted(SIGNER, "dev/*"),)), False),
        (signed(), Trust(keys=(trusted(OTHER, "*"), trusted(SIGNER, "dev/*", NAME))), True),
        (msgspec.structs.replace(signed(signer=OTHER), key=SIGNER.id), TRUST, False),
        (SIGNER.sign(Statement.of("prod/search/other", SPEC, BUNDLE, 1.5)), TRUST, False),
    ],
)
def test_trust_in_a_signature(signature: DeploySignature | None, trust: Trust, expected: bool) -> None:
    assert is_trusted(revision(signature), trust) is expected


def test_a_payload_of_a_later_release_is_refused() -> None:
    payload = b'{"function":"f","bundle":"b","spec":"s","signed_at":1,"new":2}'
    signature = DeploySignature(payload, SIGNER.id, SIGNER._key.sign(signed_bytes(payload)))
    assert not is_trusted(revision(signature))


@pytest.mark.parametrize(
    ("signature", "function", "model", "expected"),
    [
        (signed(), NAME, MODEL, True),
        (None, NAME, MODEL, False),
        (signed(), "prod/search/other", MODEL, False),
        (signed(), NAME, msgspec.structs.replace(MODEL, verify=False), False),
        (None, "", MODEL, True),
    ],
)
def test_a_builder_reads_only_signed_models(
    signature: DeploySignature | None, function: str, model: ModelSpec, expected: bool
) -> None:
    build = Build(id="b", model=model, device="cpu", created_at=1.0, function=function, signature=signature)
    if expected:
        check_build(TRUST, build)
    else:
        with pytest.raises(UntrustedDeploy):
            check_build(TRUST, build)


def test_a_build_without_a_function_is_refused_where_everything_needs_a_signature() -> None:
    with pytest.raises(UntrustedDeploy):
        check_build(Trust(requires_all=True), Build(id="b", model=MODEL, device="cpu", created_at=1.0))


def test_every_packaging_has_its_own_digest() -> None:
    entries = [EntryPoint("app", "f", packaging) for packaging in Packaging]
    assert len({spec_digest(msgspec.structs.replace(SPEC, entry=entry)) for entry in entries}) == len(Packaging)
