"""Choice of templates: which ones to keep in memory, and which one a worker forks from. Pure.

A template is identified by its Preload. A worker may fork from any template that has not read another function's
variables. The template must see GPUs if the worker has one, and have the worker's network and Python environment.
Modules that the template lacks are imported by the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.isolation import Network
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.launchers.containers.sandbox import Limits

READY_TIMEOUT_S: Final = 120.0  # for the imports: torch from a cold disk takes 20 s and more
MAX_FAILURES: Final = 3  # per template, until it is given up: a few failures may be bad luck

# The variables with which a template may import modules. A template sees the files of all workers, and many others make
# a package run code that they name: BROWSER a program, OPENSSL_CONF a library, MPLBACKEND a module.
_HARMLESS: Final = frozenset(
    {
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "HF_DATASETS_CACHE", "TORCH_HOME"),
        *("TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY", "TOKENIZERS_PARALLELISM"),
        *("PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING"),
        *("CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_CPP_MIN_LOG_LEVEL"),
        *("TZ", "LANG", "LC_ALL", "NO_COLOR"),
    }
)

ModuleSet = frozenset[str]


@dataclass(frozen=True)
class Preload:
    """Modules that a template imports, with the function's `env` set and GPUs visible or hidden. Modules read variables
    such as HF_HOME, and choose their GPU build, only when imported."""

    modules: ModuleSet = frozenset()
    env: frozenset[tuple[str, str]] = field(default=frozenset(), repr=False)
    sees_gpus: bool = False
    network: Network = Network.FULL  # its own, and its workers'
    domain: str = ""  # the trust domain of its functions
    python: Environment | None = None  # None: the agent's own

    def __str__(self) -> str:
        """Return the modules only: variables may be secrets."""
        return ",".join(sorted(self.modules))

    def is_subset_of(self, other: Preload) -> bool:
        return self.has_context_of(other) and self.modules < other.modules

    def has_context_of(self, other: Preload) -> bool:
        """Return whether both import their modules in the same environment, for functions of the same trust domain."""
        mine = self.env, self.sees_gpus, self.network, self.domain, self.python
        return mine == (other.env, other.sees_gpus, other.network, other.domain, other.python)

    def serves(
        self, env: Mapping[str, str], *, has_gpu: bool, network: Network, domain: str, python: Environment | None = None
    ) -> bool:
        """Return whether a worker may fork from it. A template without modules has read nothing of any function."""
        context = Preload(self.modules, frozenset(env.items()), has_gpu, network, domain, python)
        if self.modules:
            return self.has_context_of(context)
        return (self.python, self.network) == (python, _of_empty(network))


EMPTY = Preload()


def _of_empty(network: Network) -> Network:
    """Return the network of a template without modules: its workers can leave the node's network by themselves, but
    cannot enter another one."""
    return Network.EGRESS if network is Network.EGRESS else Network.FULL


def network_of(spec: FunctionSpec) -> Network:
    return Network.FULL if spec.network is msgspec.UNSET else spec.network


@dataclass(frozen=True)
class Use:
    """A revision's modules and `env`, its last launch or deploy (unix seconds), whether its workers have a GPU, their
    network, and its trust domain."""

    modules: ModuleSet
    last_used_at: float
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    has_gpu: bool = False
    network: Network = Network.FULL
    domain: str = ""
    python: Environment | None = None

    @property
    def preload(self) -> Preload:
        if not self.modules or not _HARMLESS.issuperset(self.env):
            return Preload(network=_of_empty(self.network), python=self.python)
        return Preload(self.modules, frozenset(self.env.items()), self.has_gpu, self.network, self.domain, self.python)


def without_env(use: Use) -> Use:
    """Return `use` for a node whose templates do not import modules with a function's variables."""
    return replace(use, modules=frozenset()) if use.env else use


@dataclass(frozen=True)
class ContainerUse:
    """A revision whose workers run in containers. `bundle` is the folder of its files. `limits` is None if it depends
    on a worker's placement: on the GPU that it gets."""

    function: str
    revision: int
    image: ImageSpec
    bundle: str
    limits: Limits | None
    modules: ModuleSet
    last_used_at: float


def select_preloads(uses: Iterable[Use], limit: int, refused: Iterable[Preload] = ()) -> list[Preload]:
    """Return at most `limit` Preloads, in the order to create them. The empty one comes first: it serves workers
    without modules and costs next to nothing. Then those used last. A Preload that another one covers gets a template
    only if there is room for all. `refused` are excluded."""
    avoid = set(refused)
    newest_first = [use.preload for use in sorted(uses, key=lambda use: -use.last_used_at)]
    if newest_first:
        newest_first.insert(0, EMPTY)
    wanted = [preload for preload in dict.fromkeys(newest_first) if preload not in avoid]
    by_need = sorted(wanted, key=lambda one: one != EMPTY and any(one.is_subset_of(other) for other in wanted))
    return [preload for preload in wanted if preload in by_need[: max(0, limit)]]


def closest(templates: Iterable[ModuleSet], modules: ModuleSet) -> ModuleSet | None:
    """Return the smallest of `templates` that has all of `modules`, else the largest without other modules.

    Even the empty template saves the interpreter's start: a worker connects after 35 ms instead of 125.
    """
    candidates = list(templates)
    complete = min((one for one in candidates if modules <= one), key=len, default=None)
    if complete is not None:
        return complete
    return max((one for one in candidates if one <= modules), key=len, default=None)


def is_worth_waiting_for(importing: ModuleSet, needed: ModuleSet, ready: ModuleSet | None) -> bool:
    """Return whether a template that imports these modules serves a worker sooner than a start of its own.

    It does if the worker would import all of them itself: the template began earlier. `ready` are the modules of the
    best template that is ready. If it has some of them, the worker's own imports may be shorter. A template with
    modules that the worker does not need may take longer.
    """
    if ready is None:
        return importing <= needed
    return bool(importing) and importing <= needed and importing.isdisjoint(ready)
