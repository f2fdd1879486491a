"""`gpufn down`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpufn.cli.terminal.command import Command, FloatRange, json_option
from gpufn.cli.terminal.output import print_json, say, step

if TYPE_CHECKING:
    from gpufn_core.home import Home


@click.command(cls=Command)
@click.option(
    "--grace",
    type=FloatRange(min=0),
    help="Seconds that running calls may take to finish; default: the value of `gpufn up`.",
)
@json_option
def down(grace: float | None, json: bool) -> None:
    """Stop the platform on this machine.

    Calls that do not finish within the grace period return to their queues and run again after the next `gpufn up`.
    """
    from gpufn_core.home import Home  # noqa: PLC0415
    from gpufn_local.instance_lock import Instance, unrecorded  # noqa: PLC0415
    from gpufn_platform.process.grace_period import describe_running_calls, running_calls, set_grace  # noqa: PLC0415

    home = Home.from_env()
    instance = Instance.running(home)
    if instance is None:
        if (error := unrecorded(home)) is not None:
            raise error
        _stop_leftover(home, json)
        return
    if grace is not None:
        set_grace(home, grace)
    with step("Stopping") as because:
        instance.stop(lambda: because(describe_running_calls(running_calls(home))))
    if json:
        print_json({"stopped": True, "pid": instance.record.pid})
    else:
        say(f"stopped {instance.record.url}")


def _stop_leftover(home: Home, json: bool) -> None:
    """Stop the nats-server of a platform that no longer runs, for example because its `gpufn up` hung."""
    from gpufn_local.instance_lock import claimed  # noqa: PLC0415
    from gpufn_local.nats_process import Leftover  # noqa: PLC0415

    leftover = Leftover.find(home.nats)
    if leftover is None:
        if json:
            print_json({"stopped": False})
        else:
            say(f"gpufn is not running in {home.root}")
        return
    with claimed(home), step("Stopping"):
        leftover.end()
    if json:
        print_json({"stopped": True, "pid": leftover.pid})
    else:
        say(f"stopped nats-server (pid {leftover.pid}), which an earlier `gpufn up` left in {home.root}")
