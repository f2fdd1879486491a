"""`gpufn down`."""

from __future__ import annotations

from gpufn.cli._render import Json, print_json, say, step


def down(json: Json = False) -> None:
    """Stop the platform on this machine."""
    from gpufn.cli._instance import Instance, untold  # noqa: PLC0415
    from gpufn.home import Home  # noqa: PLC0415

    home = Home.from_env()
    instance = Instance.running(home)
    if instance is None:
        if (error := untold(home)) is not None:
            raise error
        if json:
            print_json({"stopped": False})
        else:
            say(f"gpufn is not running in {home.root}")
        return
    with step("Stopping"):
        instance.stop()
    if json:
        print_json({"stopped": True, "pid": instance.record.pid})
    else:
        say(f"stopped {instance.record.url}")
