"""The checks of a new revision, before it is stored: signature, isolation, uploads, source, volumes and secrets."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gpufn_core.domain.revision import Check, CheckState, Lease, Revision, Source
from gpufn_core.errors import Conflict, InvalidBundle, InvalidInput, InvalidSpec
from gpufn_core.ids import Digest
from gpufn_core.protocol import subjects
from gpufn_core.signing.statement import DeploySignature
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.naming.names import home_of
from gpufn_core.spec.volume_spec import full_name_at
from gpufn_gateway.arguments.signature import Signature
from gpufn_gateway.auth.access import LOCAL, Principal
from gpufn_gateway.auth.scopes import DEPLOY, READ
from gpufn_gateway.buckets import Buckets, decode_function, decode_revision
from gpufn_gateway.builds.artifacts import Artifacts
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.secret_use import secret_scopes
from gpufn_gateway.teams.function_limit import check_functions
from gpufn_gateway.teams.storage import TeamStorage
from gpufn_gateway.volumes.volumes import Volumes
from gpufn_gateway.webhooks.address_policy import AddressPolicy
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from gpufn_platform.signing.signatures import Signatures


class SourceConflict(Conflict):
    """The active revision came from another file or project."""

    retryable = False

    def __init__(self, before: Revision, source: Source | None) -> None:
        assert before.source is not None
        here = "a client that sends no source" if source is None else str(source)
        if source is not None and str(source) == str(before.source):
            here = "another project of the same name"
        by = f", deployed by {before.source.deployer}" if before.source.deployer else ""
        super().__init__(
            f"{before} is from {before.source}{by}, and this deploy is from {here}: replace it with "
            f'"replace": true, or deploy under another name',
            field="replace",
        )


class LeaseLost(Conflict):
    """The function is permanent, or another holder has its lease."""

    retryable = False


class DeployOptions(msgspec.Struct, frozen=True):
    """Options of a deploy. `check`: move calls once a worker of the revision has started. `replace`: allow an active
    revision that came from another file or project than `source`. `code`, `deploy_id`, `signature` and `lease` are as
    in Revision. `principal` is the deployer, whose rights determine the secrets of the function."""

    check: bool = True
    source: Source | None = None
    replace: bool = False
    code: str = ""
    deploy_id: str = ""
    signature: DeploySignature | None = None
    principal: Principal = LOCAL
    lease: Lease | None = None


@dataclass(kw_only=True, eq=False)
class DeployChecks:
    bus: Bus
    buckets: Buckets
    registry: Registry
    artifacts: Artifacts
    addresses: AddressPolicy
    signatures: Signatures
    storage: TeamStorage
    volumes: Volumes

    async def has_bundle(self, digest: str) -> bool:
        """Return whether a bundle is stored and intact. This renews its age, because it is about to be deployed."""
        is_stored = await object_store.touch(self.bus, subjects.BUNDLES, digest)
        return is_stored and await object_store.verify(self.bus, subjects.BUNDLES, digest)

    async def new_revision(
        self, spec: FunctionSpec, bundle: str, options: DeployOptions, created_at: float
    ) -> Revision:
        """Return a revision without its number. Check the signature, the isolation, the number of functions, the
        webhook's address, the schedule's arguments, the uploads, the source, the volumes, the storage of its team and
        the secrets."""
        revision = _revision(spec, Digest(bundle), options, created_at)
        await self.signatures.verify_new(revision)
        self._check_isolation(spec)
        check_functions(spec.name, self.registry)
        try:
            if spec.webhook is not None:
                self.addresses.check(spec.webhook)
            if spec.schedule is not None and (method := spec.method(spec.schedule.method)) is not None:
                Signature.of(method).check(msgspec.json.encode(spec.schedule.arguments))
        except InvalidInput as error:
            raise InvalidSpec(f"{spec.name}: {error.message}") from error
        if not await self.has_bundle(bundle):
            raise InvalidBundle(f"The bundle {bundle[:12]} is not uploaded: PUT /v1/bundles/{bundle} first.")
        await self.artifacts.check_uploaded(spec.models, spec.weights)
        await self._check_replaced(spec.name, options)
        self._check_volumes(spec, options.principal)
        await self.storage.check(revision, options.principal)
        scopes = await secret_scopes(options.principal, self.registry, self.buckets.secrets, spec)
        return msgspec.structs.replace(revision, secret_scopes=scopes)

    def check_earlier(self, revision: Revision) -> None:
        """Check an earlier revision by the rules of today. Raises UntrustedDeploy if it lacks the signature that its
        environment requires, InvalidSpec if its team requires a stronger isolation."""
        self.signatures.check_new(revision)
        self._check_isolation(revision.spec)

    def _check_isolation(self, spec: FunctionSpec) -> None:
        team = self.registry.teams.get(self.registry.teams.name_of(spec.name))
        if team is not None and not team.accepts(spec):
            raise InvalidSpec(
                f"{spec.name}: functions of the team {team.name} need isolation={team.isolation.value!r} or stronger. "
                f"Set isolation={team.isolation.value!r}."
            )

    def _check_volumes(self, spec: FunctionSpec, principal: Principal) -> None:
        """Raises InvalidSpec for a volume that does not exist, or for which the deployer has no right."""
        for mount in spec.mounts:
            name = full_name_at(mount.name, home_of(spec.name))
            verb = DEPLOY if mount.writable else READ
            if not principal.may(verb, name):
                raise InvalidSpec(f"{spec.name}: its volume {name} needs an API key with the scope '{verb}:{name}'.")
            if not mount.writable and not self.volumes.exists(name):
                raise InvalidSpec(
                    f"{spec.name}: there is no volume {name}: fill it first with `gpufn volume put {name} FOLDER`, "
                    "or write the full name of another one: Volume('ENV/APP/NAME')."
                )

    async def _check_replaced(self, name: str, options: DeployOptions) -> None:
        """Raises LeaseLost if a temporary function would replace a permanent one, and SourceConflict. Reads the records
        from the bus, because a watch may lag. A revision without a source, from an earlier gpufn or a plain HTTP
        client, may be replaced by any deploy."""
        entry = await self.buckets.functions.get(name)
        if entry is None:
            return
        function = decode_function(entry.value)
        if options.lease is not None and function.lease is None:
            raise LeaseLost(f"{name} is deployed permanently: choose another environment, or delete it first.")
        if options.replace:
            return
        stored = await self.buckets.revisions.get(subjects.revision_key(name, function.active))
        before = None if stored is None else decode_revision(stored.value)
        if before is None or before.source is None:
            return
        if options.source is None or not before.source.is_same_file(options.source):
            raise SourceConflict(before, options.source)


def _revision(spec: FunctionSpec, bundle: Digest, options: DeployOptions, created_at: float) -> Revision:
    return Revision(
        function=spec.name,
        number=0,
        spec=spec,
        bundle=bundle,
        created_at=created_at,
        check=Check(CheckState.PENDING) if options.check else None,
        source=options.source,
        code=options.code,
        deploy_id=options.deploy_id,
        signature=options.signature,
        lease=options.lease,
    )
