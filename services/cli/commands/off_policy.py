"""`freshet off-policy`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from services.cli import options
from services.cli.commands.experiments import Name, current_experiments
from services.cli.commands.results import Archive, metric_of, opened
from services.cli.output import answer, echo, group_command, sentences, table, usage_error

if TYPE_CHECKING:
    from services.offline.experiments.policies import Estimates, Given

app = typer.Typer(
    name="off-policy",
    help="Estimate the reward of another policy, from a log of randomised answers.",
    no_args_is_help=True,
)
Metric = Annotated[str, Option(help="The reward: TYPE counts interactions, TYPE:value sums their values.")]


@group_command(app)
def arms(
    name: Name,
    *,
    give: Annotated[
        list[str], Option(help="CONTEXT=VALUE:ARM: the arm for requests with this context. Last: ARM, for all others.")
    ],
    metric: Metric,
    archive: Archive = None,
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Estimate the reward per answer if the request's context chose the arm, from an experiment's exposures.

    Example:  freshet off-policy arms diversity --metric click --give device=tv:diverse --give control
    """
    from services.offline.experiments.off_policy import NoSupport
    from services.offline.experiments.policies import of_arms

    policy, reward = [_given(text) for text in give], metric_of(metric)
    with sentences(NoSupport), opened(state, archive) as log:
        found = of_arms(log, current_experiments(state).find(name), policy, reward)
    answer(asdict(found), lambda: _print(found))


@group_command(app)
def new_items(*, metric: Metric, archive: Archive = None, state: options.State = options.DEFAULT_STATE) -> None:
    """Estimate the reward per answer without positions for new items, from answers that had some.

    Example:  freshet off-policy new-items --metric click
    """
    from services.offline.experiments.off_policy import NoSupport
    from services.offline.experiments.policies import without_new_items

    reward = metric_of(metric)
    with sentences(NoSupport), opened(state, archive) as log:
        found = without_new_items(log, reward)
    answer(asdict(found), lambda: _print(found))


def _given(text: str) -> "Given":
    from services.offline.experiments.policies import Given

    entry, separator, arm = text.rpartition(":")
    name, equals, value = entry.partition("=")
    if not arm or (separator and not (name and equals)):
        raise usage_error(f"give={text!r} allowed: ARM, or CONTEXT=VALUE:ARM", "device=tv:diverse")
    return Given(arm=arm, name=name, value=value)


def _print(found: "Estimates") -> None:
    part = "" if found.positions is None else f", positions 1 to {found.positions}"
    columns = ("policy", "per answer", "95 %", "effective users")
    shown = table(*columns, right=columns[1:], title=f"{found.answers:,} answers of {found.users:,} users{part}")
    for name, one in {"as it ran": found.ran, **{f"the other, {by}": of for by, of in found.other.items()}}.items():
        shown.add_row(name, f"{one.mean:.4f}", f"[{one.low:.4f}, {one.high:.4f}]", f"{one.effective_users:,.0f}")
    echo(shown)
