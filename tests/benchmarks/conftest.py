"""The benchmarks are scripts in one folder that import each other by plain names."""

from __future__ import annotations

import sys

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
