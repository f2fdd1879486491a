from __future__ import annotations

from typing import Any

import pytest

from gpufn_runtime.agent.launchers.containers.runtimes import gvisor_trouble


@pytest.mark.parametrize(
    ("runtimes", "words"),
    [
        (None, "no runtime runsc"),
        ({"runc": {"path": "runc"}}, "no runtime runsc"),
        ({"runsc": {"path": "/usr/bin/runsc"}}, "lacks the option --host-uds=open"),
        ({"runsc": {"runtimeArgs": ["--host-uds=none", "--host-fifo=open"]}}, "lacks the option --host-uds=open"),
        ({"runsc": {"runtimeArgs": ["--host-uds=all"]}}, "lacks the option --host-fifo=open"),
        ({"runsc": {"runtimeArgs": ["--debug", "--host-uds=open", "--host-fifo=open"]}}, ""),
    ],
)
def test_gvisor_is_offered_if_docker_has_it_with_the_options_that_workers_need(
    runtimes: dict[str, Any] | None, words: str
) -> None:
    trouble = gvisor_trouble({"Runtimes": runtimes})
    assert words in trouble
    assert bool(trouble) == bool(words)
