"""`gpufn teams ls`, `set`, `rm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from gpufn.cli.terminal.command import Argument, FloatRange, Group, IntRange, connect, json_option, yes_option
from gpufn.cli.terminal.output import WrongUsage, confirm, print_json, print_table, say_or_json
from gpufn.client.views.access import TeamView
from gpufn_core.domain.team import TeamLimits
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.isolation import LEAST, Isolation
from gpufn_core.spec.units import format_bytes, parse_bytes

app = Group("teams", help="List, set and remove teams: who owns which functions.")

_SECONDS = FloatRange(0.001, 1e9)
_name_argument = click.argument("name", cls=Argument, help="Name of the team.")


@app.command("ls")
@json_option
def list_teams(json: bool) -> None:
    """List the teams, with what they use and their limits. A key of a team sees its own."""
    with connect() as client:
        teams = client.teams()
    if json:
        print_json(teams)
        return
    rows = [(team.name, ", ".join(team.owns), f"{team.weight:g}", team.isolation.value, *_use(team)) for team in teams]
    use = ("workers", "GPUs", "queued", "run s today", "GPU s today", "stored", "functions")
    print_table(("team", "owns", "weight", "isolation", *use), rows, empty="no teams: see `gpufn teams set --help`")


@app.command("set")
@_name_argument
@click.option(
    "--owns",
    multiple=True,
    required=True,
    help="Functions of the team: 'prod/search/*', '*/search/*', 'prod/*' or a full name. Repeatable.",
)
@click.option(
    "--weight", type=FloatRange(0.001, 1000), default=1.0, help="Share of GPU seconds, relative to other teams."
)
@click.option("--workers", type=IntRange(min=0), help="Maximum number of workers at the same time.")
@click.option("--gpus", type=FloatRange(min=0), help="Maximum number of GPUs at the same time; 0.5 is half of one.")
@click.option("--queued", type=IntRange(min=1), help="Maximum number of submitted calls that have not ended.")
@click.option("--run-seconds", "run_s", type=_SECONDS, help="Maximum run time of its calls in seconds per UTC day.")
@click.option("--gpu-seconds", "gpu_s", type=_SECONDS, help="Maximum GPU seconds of its calls per UTC day.")
@click.option("--functions", type=IntRange(min=0), help="Maximum number of functions. Default: 1,000.")
@click.option("--storage", help="Maximum size of bundles, models, weights and engines, such as 50GB.")
@click.option(
    "--isolation",
    type=click.Choice([tier.value for tier in LEAST]),
    default=Isolation.PROCESS.value,
    help="The weakest isolation that its functions may have.",
)
@click.option(
    "--callers",
    multiple=True,
    help="Functions of other teams whose code may call the functions of this team: 'prod/search/*' or '*'. Repeatable.",
)
@click.option(
    "--trust-domain",
    "trust_domains",
    multiple=True,
    help="Domain in which its functions share GPUs with those of other teams that also have it. Repeatable.",
)
@json_option
def set_(
    name: str,
    owns: tuple[str, ...],
    *,
    weight: float,
    storage: str | None,
    isolation: str,
    callers: tuple[str, ...],
    trust_domains: tuple[str, ...],
    json: bool,
    **limits: Any,
) -> None:
    """Create a team, or replace its settings.

    Options that are left out are reset. Teams that compete for room get GPU seconds by weight, and borrow what other
    teams do not use. Functions of different teams share no GPU, unless both teams have their trust domain.
    """
    try:
        stored_bytes = None if storage is None else parse_bytes(storage)
    except InvalidSpec as error:
        raise WrongUsage(error.message, field="--storage") from None
    with connect() as client:
        set_limits = TeamLimits(**limits, stored_bytes=stored_bytes)
        team = client.set_team(
            name,
            owns,
            weight=weight,
            limits=set_limits,
            isolation=isolation,
            callers=callers,
            trust_domains=trust_domains,
        )
    say_or_json(f"team {team.name} owns {', '.join(team.owns)}; {_limits(team.limits)}", team, json=json)


@app.command("rm")
@_name_argument
@yes_option
@json_option
def remove(name: str, yes: bool, json: bool) -> None:
    """Remove a team. Its functions stay and belong to no team."""
    confirm(f"Remove the team {name} with its limits?", yes=yes)
    with connect() as client:
        client.delete_team(name)
    say_or_json(f"removed team {name}", {"removed": name}, json=json)


def _use(team: TeamView) -> list[str]:
    """Describe what a team uses of its limits, by column."""
    use, limits = team.use, team.limits

    def amount(used: float, limit: float | None, show: Callable[[float], str] = "{:,.0f}".format) -> str:
        return show(used) if limit is None else f"{show(used)} of {show(limit)}"

    borrowed = f", {use.borrowed_gpus:.3g} borrowed" if use.borrowed_gpus else ""
    return [
        amount(use.workers, limits.workers),
        amount(use.gpus, limits.gpus, "{:.3g}".format) + borrowed,
        amount(use.queued, limits.queued),
        amount(use.run_s, limits.run_s),
        amount(use.gpu_s, limits.gpu_s),
        amount(use.stored_bytes, limits.stored_bytes, format_bytes),
        amount(use.functions, team.max_functions),
    ]


def _limits(limits: TeamLimits) -> str:
    """Describe limits, such as `10 workers, 4 GPUs`.

    >>> _limits(TeamLimits(workers=10, gpu_s=3600.0)), _limits(TeamLimits())
    ('at most 10 workers, 3,600 GPU seconds per day', 'no limits')
    """
    parts = {
        "workers": limits.workers,
        "GPUs": limits.gpus,
        "queued calls": limits.queued,
        "run seconds per day": limits.run_s,
        "GPU seconds per day": limits.gpu_s,
        "functions": limits.functions,
    }
    texts = [f"{value:,g} {unit}" for unit, value in parts.items() if value is not None]
    if limits.stored_bytes is not None:
        texts.append(f"{format_bytes(limits.stored_bytes)} stored")
    return f"at most {', '.join(texts)}" if texts else "no limits"
