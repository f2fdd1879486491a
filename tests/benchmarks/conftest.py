"""The benchmarks are scripts beside each other: they import each other by plain names."""

from __future__ import annotations

import sys

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
