"""`freshet experiments`: assign arms to shares of users."""

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from services.cli import client, options
from services.cli.output import CommandError, answer, echo, group_command, sentences, table
from services.cli.staging import kafka_of

if TYPE_CHECKING:
    from services.contracts.operation_log import Control
    from services.contracts.topics.experiments import Experiment, Experiments

app = typer.Typer(
    name="experiments",
    help="Give arms to shares of users: another model, rules, diversity, a share of new items.",
    no_args_is_help=True,
)

Name = Annotated[str, Argument(help="The experiment's name.")]


@group_command(app)
def create(
    file: Annotated[Path, Argument(help="The experiment as YAML; `freshet experiments example` prints one.")],
    *,
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Reserve users of a layer for an experiment; `freshet experiments start` starts it.

    Example:  freshet experiments create diversity.yaml
    """
    from services.contracts.topics.experiments import experiment_of
    from services.contracts.yaml_files import read_experiment

    with sentences():
        new = replace(experiment_of(read_experiment(file)), salt=secrets.token_hex(8))
        _check_sets(new, state)
    after = operated(lambda held: held.created(new), f"create {new.name}", state)
    _say(after.find(new.name), "created: it starts with `freshet experiments start`")


@app.command()
def example() -> None:
    """Print an example of an experiment file."""
    from services.contracts.yaml_files import EXAMPLE

    typer.echo(EXAMPLE, nl=False)


@group_command(app)
def start(name: Name, *, state: options.State = options.DEFAULT_STATE) -> None:
    """Start an experiment: its users now get the answers of its arms.

    Example:  freshet experiments start diversity
    """
    after = operated(lambda held: held.started(name, now_ms()), f"start {name}", state)
    _say(after.find(name), "started: gateways apply it within a second or two")


@group_command(app)
def stop(name: Name, *, state: options.State = options.DEFAULT_STATE) -> None:
    """End the experiment; its results stay. It cannot start again.

    Example:  freshet experiments stop diversity
    """
    after = operated(lambda held: held.stopped(name, now_ms()), f"stop {name}", state)
    _say(after.find(name), "stopped")


@group_command(app)
def remove(name: Name, *, state: options.State = options.DEFAULT_STATE) -> None:
    """Remove a stopped experiment, or one that never started, from the list.

    Example:  freshet experiments remove diversity
    """
    operated(lambda held: held.removed(name), f"remove {name}", state)
    answer({"removed": name}, f"{name} is removed")


@group_command(app, "list")
def list_experiments(*, state: options.State = options.DEFAULT_STATE) -> None:
    """List all experiments with their arms and shares.

    Example:  freshet experiments list
    """
    with sentences():
        current = current_experiments(state)
    found = [_plain(one) for one in current.experiments.values()]

    def shown() -> None:
        rows = (
            (one.name, one.layer, f"{one.share:.0%}", _arms(one), one.state.name.lower())
            for one in current.experiments.values()
        )
        echo(table("experiment", "layer", "users", "arms", "state", rows=rows))

    answer({"revision": current.revision, "experiments": found}, shown)


def current_experiments(state: Path) -> "Experiments":
    """Return the newest state of a stack's experiments. It is empty before the first operation."""
    from services.contracts.topics.experiments import Experiments

    last = _control(state).read().last
    return Experiments() if last is None else last.after


def operated(operation: "Callable[[Experiments], Experiments]", description: str, state: Path) -> "Experiments":
    """Apply the operation and return the new state. Raises: CommandError."""
    with sentences():
        return _control(state).write(operation(current_experiments(state)), description)


def _control(state: Path) -> "Control[Experiments]":
    from services.contracts.operation_log import Control
    from services.contracts.topics.experiments import OPERATIONS

    return Control(kafka_of(client.stack_of(state)), OPERATIONS)


def _check_sets(new: "Experiment", state: Path) -> None:
    """Check that the arms' version sets are staged. Raises: CommandError."""
    from services.cli.staging import sets_of

    wanted = {arm.version_set for arm in new.arms if arm.version_set}
    sets = sets_of(client.stack_of(state)) if wanted else None
    if wanted and (lacking := wanted - (sets.sets.keys() if sets else set())):
        raise CommandError(
            f"arms name version sets that are not staged: {', '.join(sorted(lacking))}",
            advice="freshet model stage NAME --bundle DIR",
        )


def _plain(one: "Experiment") -> dict[str, Any]:
    arms = [asdict(arm) | {"rules": [rule.name for rule in arm.rules]} for arm in one.arms]
    found = asdict(one) | {"arms": arms, "state": one.state.name.lower()}
    del found["salt"]
    return found


def _say(one: "Experiment", outcome: str) -> None:
    users = f"{one.share:.0%} of the users of layer {one.layer}"
    answer(_plain(one), f"{one.name} is {outcome}\n  {users}: {_arms(one)}")


def _arms(one: "Experiment") -> str:
    return ", ".join(f"{arm.name} {arm.share:.0%}" for arm in one.arms)


def now_ms() -> int:
    """Return Unix milliseconds."""
    return time.time_ns() // 1_000_000
