"""The prices of GPU and CPU hours, and the budgets, as an operator writes them in a TOML file. Pure.

currency = "EUR"
gpu_hour = 0.80            # a GPU that nothing below names
cpu_hour = 0.03            # a core
co2_g_per_kwh = 380

[gpus]                     # by a part of the GPU's name; the longest that fits counts
L4 = 0.71
"H100 NVL" = 2.99

[nodes."spot-*"]           # by the node's name; the first that fits counts, before the GPU's name
gpu_hour = 0.35

[budgets."team:search"]    # or function:NAME; per UTC month
month = 500.0
warn = 0.8
stop = true
"""

from __future__ import annotations

import fnmatch
import math
import re
from typing import Final

import msgspec

from gpufn_core.spec.naming.names import GROUP, is_function_name

_MOST: Final = 1e9  # the largest amount of money or CO2
_CURRENCY: Final = re.compile(r"[A-Z]{3}")


class NodePrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prices of nodes. None: as for other nodes."""

    gpu_hour: float | None = None
    cpu_hour: float | None = None
    co2_g_per_kwh: float | None = None


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Money per UTC month. From the share `warn` of it on there is an event; with `stop`, calls are refused once it is
    used up."""

    month: float
    warn: float = 0.8
    stop: bool = False


class Rates(msgspec.Struct, frozen=True):
    """Prices of an hour of one GPU and of one core of a node."""

    gpu_hour: float
    cpu_hour: float
    co2_g_per_kwh: float | None = None


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    currency: str
    gpu_hour: float = 0.0
    cpu_hour: float = 0.0
    co2_g_per_kwh: float | None = None
    gpus: dict[str, float] = {}
    nodes: dict[str, NodePrices] = {}
    budgets: dict[str, Budget] = {}

    @classmethod
    def parse(cls, text: bytes) -> Prices:
        """Raises ValueError, msgspec.MsgspecError, with what is wrong in the file."""
        prices = msgspec.toml.decode(text, type=cls)
        prices._check()
        return prices

    def _check(self) -> None:
        if _CURRENCY.fullmatch(self.currency) is None:
            raise ValueError(f"currency is a code of three capital letters, such as EUR, not {self.currency[:20]!r}")
        numbers: dict[str, float | None] = {
            "gpu_hour": self.gpu_hour,
            "cpu_hour": self.cpu_hour,
            "co2_g_per_kwh": self.co2_g_per_kwh,
            **{f"gpus.{kind}": price for kind, price in self.gpus.items()},
        }
        for pattern, node in self.nodes.items():
            numbers |= {f"nodes.{pattern}.{name}": value for name, value in msgspec.structs.asdict(node).items()}
        for subject, budget in self.budgets.items():
            numbers |= {f"budgets.{subject}.month": budget.month}
            kind, _, name = subject.partition(":")
            is_known = GROUP.fullmatch(name) if kind == "team" else kind == "function" and is_function_name(name)
            if not is_known:
                raise ValueError(f"budgets.{subject[:80]!r}: name it team:TEAM, or function: and the full name")
            if not 0 < budget.warn <= 1:
                raise ValueError(f"budgets.{subject}.warn is a share above 0, at most 1")
        for name, value in numbers.items():
            if value is not None and not (math.isfinite(value) and 0 <= value <= _MOST):
                raise ValueError(f"{name} is a number from 0 to {_MOST:.0e}, not {value}")

    def rates(self, node: str, gpu_kind: str = "") -> Rates:
        """Return the rates of a node. Without the name of its GPUs they cost `gpu_hour`, unless the node has a price.

        >>> prices = Prices("EUR", 0.8, gpus={"L4": 0.7, "L40S": 1.1}, nodes={"spot-*": NodePrices(gpu_hour=0.3)})
        >>> nodes = (("a", "NVIDIA L40S"), ("a", "NVIDIA L4"), ("spot-1", "NVIDIA L4"), ("a", ""))
        >>> [prices.rates(*node).gpu_hour for node in nodes]
        [1.1, 0.7, 0.3, 0.8]
        """
        own = next((each for pattern, each in self.nodes.items() if fnmatch.fnmatchcase(node, pattern)), NodePrices())
        kind = gpu_kind.lower()
        fitting = [name for name in self.gpus if name.lower() in kind]
        by_kind = self.gpus[max(fitting, key=len)] if fitting else self.gpu_hour
        return Rates(
            by_kind if own.gpu_hour is None else own.gpu_hour,
            self.cpu_hour if own.cpu_hour is None else own.cpu_hour,
            self.co2_g_per_kwh if own.co2_g_per_kwh is None else own.co2_g_per_kwh,
        )
