from __future__ import annotations

import subprocess
import sys

import pytest

LOOKS = """
import sys
import {first}
import gpufn_platform.bus.tcp_connection
print("aiohttp" in sys.modules)
import aiohttp
print(aiohttp.ClientSession.__name__)
"""


@pytest.mark.parametrize(("first", "is_imported"), [("asyncio", False), ("aiohttp", True)])
def test_a_process_on_the_bus_does_not_import_aiohttp_but_may(first: str, is_imported: bool) -> None:
    pytest.importorskip("aiohttp")
    ended = subprocess.run(
        [sys.executable, "-c", LOOKS.format(first=first)], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == [str(is_imported), "ClientSession"]
