"""The records that an agent reads, and its options."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpufn_core.spec.image_spec import ImageSpec
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.grace_period import GRACE_S
from gpufn_runtime.agent.decide import reconcile


@dataclass(frozen=True, kw_only=True)
class AgentBuckets:
    """The agent reads all of them, and deletes the assignments of workers that have ended."""

    assignments: KeyValue
    functions: KeyValue
    revisions: KeyValue
    teams: KeyValue | None = None


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Options that differ between nodes. `park_bytes` is the host memory for parked workers. `isolation_trouble` says
    why a kind of isolation is not available here."""

    default_image: ImageSpec | None = None
    open_files: int | None = None
    supervisor_fifo: str = ""
    isolation_trouble: dict[str, str] = field(default_factory=dict)
    park_bytes: int | None = None
    address: str = ""
    grace_s: float = GRACE_S
    kill_after_s: float = reconcile.KILL_AFTER_S
    drain_grace_s: float = reconcile.DRAIN_GRACE_S
    tick_s: float = 1.0
