"""`freshet model`: stage a new model next to the serving one, and promote or retire it."""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from services.cli import client, options, output, staging
from services.cli.commands.experiments import current_experiments

if TYPE_CHECKING:
    from freshet.v1 import gateway_pb2

    from services.contracts.operations import Operation
    from services.contracts.topics.version_sets import VersionSets
    from services.stack import Stack

app = typer.Typer(
    name="model", help="Stage a new model next to the serving one, try it, promote it, roll back.", no_args_is_help=True
)

# A gateway closes the connections of a removed set after five seconds.
_LAST_CALLS_S = 6.0
_GO_BY_S = 10.0
# Each version set of a stack has its own instance of these processes. They load another bundle in this order.
_OF_A_SET = ("refresher", "reranker", "candidates")

Name = Annotated[str, Argument(help="The set's name.")]
ShareArgument = Annotated[str, Argument(help="5% or 0.05; 0 ends it.")]
Gateways = Annotated[
    str, Option("--gateways", envvar="FRESHET_GATEWAYS", help="host:port of every gateway, comma-separated.")
]
WaitS = Annotated[float, Option(min=0, help="Timeout in seconds.")]


@output.group_command(app)
def stage(
    name: Name,
    bundle: Annotated[Path, Option("--bundle", help="The new model's bundle.")],
    *,
    text: Annotated[Path | None, Option(help="Its own text bundle, if any.")] = None,
    candidates: Annotated[str, Option(help="host:port, if you started the set's processes yourself.")] = "",
    reranker: Annotated[str, Option(help="host:port, as --candidates.")] = "",
    refreshers: Annotated[str, Option(help="host:port, comma-separated, as --candidates.")] = "",
    generator: Annotated[str, Option(help="host:port; default: the existing one.")] = "",
    serving: Annotated[Path | None, Option(help="The serving bundle, to stage the first set [the stack's].")] = None,
    state: options.State = options.DEFAULT_STATE,
    gateways: Gateways = "",
    wait_s: WaitS = 120,
) -> None:
    """Load a set next to the serving one, in every process; it answers no user yet.

    On a local stack the command starts the set's candidates, reranker and refresher, if there is enough memory.
    Elsewhere start them yourself and give their addresses. The encoder then makes states and attributions for both
    sets.

    Example:  freshet model stage next --bundle .freshet/next
    """
    addresses = {
        "candidates": candidates,
        "reranker": reranker,
        "refreshers": tuple(one.strip() for one in refreshers.split(",") if one.strip()),
        "generator": generator,
    }
    after = staging.stage_bundle(
        name, bundle, text=text, addresses=addresses, serving=serving, state=state, gateways=gateways, wait_s=wait_s
    )
    _say(after, f"set {name} is staged: model {after.sets[name].model_version} answers nobody yet")


@output.group_command(app)
def warm(
    name: Name,
    *,
    share: Annotated[float, Option(min=0.01, max=1, help="Largest share of one core.")] = 0.1,
    attributions: Annotated[bool, Option(help="Also encode past interactions for its item states.")] = True,
    state: options.State = options.DEFAULT_STATE,
) -> None:
    """Compute a set's states of all users with a history, and its attributions of interactions before its staging.

    The encoder handles new events meanwhile, so one run is enough. After an interruption, the next call continues. The
    command uses only idle processor time, at most the given share of one core.

    Example:  freshet model warm next --share 0.5
    """
    from services.encoder.config import EncoderSettings
    from services.offline.backfill.jobs import run_reattribution, run_warming
    from services.offline.backfill.pace import Pace

    with output.sentences(), output.progress() as update:
        main = client.stack_of(state)
        found = staging.required(main).find(name)
        settings = EncoderSettings(
            bundle=Path(found.bundle), kafka_bootstrap=staging.kafka_of(main), redis_url=staging.redis_of(main)
        )
        os.nice(19)
        pace = Pace(share)

        def slowly(what: str, done: int, total: int) -> None:
            update(what, done, total)
            pace.rest()

        report = run_warming(settings, partial(slowly, "users"))
        written = run_reattribution(settings, partial(slowly, "interactions")).attributions if attributions else 0
    output.answer(
        {"set": name, "active": report.active, "warm": report.warm, "made": report.made, "attributions": written},
        f"{report.warm:,} of {report.active:,} people are warm ({report.made:,} made now), {written:,} attributions",
    )


@output.group_command(app)
def shadow(
    name: Name, share: ShareArgument, *, state: options.State = options.DEFAULT_STATE, gateways: Gateways = ""
) -> None:
    """Also send this share of requests to the set, after they are answered; `freshet model list` compares the answers.

    Example:  freshet model shadow next 20%
    """
    _operate(lambda sets: sets.shadowed(name, _share(share)), f"shadow {name} {share}", state, gateways)


@output.group_command(app)
def canary(
    name: Name, share: ShareArgument, *, state: options.State = options.DEFAULT_STATE, gateways: Gateways = ""
) -> None:
    """Let the set answer this share of users. The users stay the same; a larger share adds users.

    Example:  freshet model canary next 5%
    """
    salt = secrets.token_hex(8)
    _operate(lambda sets: sets.canaried(name, _share(share), salt), f"canary {name} {share}", state, gateways)


@output.group_command(app)
def promote(
    name: Name, *, wait_s: WaitS = 60, state: options.State = options.DEFAULT_STATE, gateways: Gateways = ""
) -> None:
    """Let the set answer all users once it has states of 99 % of users with a history. The previous set stays warm.

    Example:  freshet model promote next
    """
    from services.encoder.config import EncoderSettings
    from services.offline.backfill.jobs import measure_warmth
    from services.user_state.warmth import WARM

    with output.sentences():
        main = client.stack_of(state)
        sets = staging.required(main)
        sets.promoted(name)
        settings = EncoderSettings(bundle=Path(sets.find(name).bundle), redis_url=staging.redis_of(main))
        until = time.monotonic() + wait_s
        while (report := measure_warmth(settings)).share < WARM:
            if time.monotonic() > until:
                raise output.CommandError(
                    f"{report.warm:,} of {report.active:,} people are warm ({report.share:.1%}); allowed: {WARM:.0%}",
                    advice=f"freshet model warm {name}",
                )
            time.sleep(0.5)
        staging.wait_for_gateways(staging.gateways_of(gateways, main), sets.revision, wait_s, ready=name)
    _operate(lambda sets: sets.promoted(name), f"promote {name}", state, gateways)


@output.group_command(app)
def rollback(*, state: options.State = options.DEFAULT_STATE, gateways: Gateways = "") -> None:
    """End the canary. Without a canary, let the set that served before the last promotion answer again at once.

    Example:  freshet model rollback
    """
    _operate(lambda sets: sets.rolled_back(), "rollback", state, gateways)


@output.group_command(app)
def retire(name: Name, *, state: options.State = options.DEFAULT_STATE, gateways: Gateways = "") -> None:
    """Remove a set that answers no user, and end its processes on a local stack.

    If the stack was started with this set, the stack's processes load the remaining set one after the other. A compact
    stack loads it at the next start.

    Example:  freshet model retire next
    """
    from services.stack import StackError
    from services.stack.version_sets import remove_set, set_names

    with output.sentences():
        main = client.stack_of(state)
        after, local, gone = staging.required(main), set_names(main), name
        # A set that a gateway retired (ChangeVersionSet) may still have its processes.
        is_left = name in local or (len(after.sets) == 1 and after.serving in local)
        if name in after.sets or not is_left:
            after.retired(name)
            current_experiments(state).check_no_arm(name)
            after = _operated(lambda sets: sets.retired(name), f"retire {name}", main, gateways)
        if after.serving in local and name not in local:
            # Replace the bundle after the retirement: until then a rollback could need the set that these processes
            # serve.
            parts = _OF_A_SET if main.profile == "split" else ()
            try:
                with output.stack_progress() as say:
                    main = client.stack_of(state, say=say)
                    main.replace_bundle(Path(after.sets[after.serving].bundle), parts)
            except StackError as exc:
                exc.advice = "freshet down, then freshet up: the stack is noted with the remaining model"
                raise
            if parts:
                gone = after.serving
                after = _operated(lambda sets: sets.settled(), f"retire {name}: taken over", main, gateways)
        if gone in local:
            # Wait until gateways have finished calls in flight on the existing connections.
            time.sleep(_LAST_CALLS_S)
            remove_set(main, gone)
    _say(after, f"retire {name}")


@output.group_command(app, "list")
def list_(
    *,
    state: options.State = options.DEFAULT_STATE,
    gateways: Gateways = "",
    history: Annotated[bool, Option("--history", help="All operations so far.")] = False,
) -> None:
    """Show the sets, their shares, and each gateway's view of them.

    Example:  freshet model list
    """
    from google.protobuf.json_format import MessageToDict

    with output.sentences():
        main = client.stack_of(state)
        counted = staging.control_of(main).read()
        answers = staging.ask_gateways(staging.gateways_of(gateways, main))
    plain = {target: MessageToDict(found, preserving_proto_field_name=True) for target, found in answers.items()}
    operations = [
        {
            "revision": one.after.revision,
            "operation": one.operation,
            "operator": one.operator,
            "time_ms": one.time_ms,
            "serving": one.after.serving,
        }
        for one in counted.operations
    ]
    output.answer(
        {"gateways": plain, "operations": operations},
        lambda: _print(answers, counted.operations if history else ()),
    )


def _print(
    answers: "Mapping[str, gateway_pb2.GetVersionSetsResponse]", history: "Sequence[Operation[VersionSets]]"
) -> None:
    for target, found in answers.items():
        rows = (
            (one.set.name, one.set.model_version, _part_of(one.set.name, found), f"{one.answered:,}", one.problem)
            for one in found.sets
        )
        columns = ("set", "model", "", "answered", "problem")
        output.echo(output.table(*columns, rows=rows, right=("answered",), title=f"gateway {target}"))
        for one in found.sets:
            if one.HasField("shadow"):
                output.echo(_shadow_text(one.set.name, one.shadow))
    if history:
        shown = output.table("", "when", "who", "what", right=("",))
        for done in history:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(done.time_ms / 1000))
            shown.add_row(str(done.after.revision), when, done.operator, done.operation)
        output.echo(shown)


def _operate(operation: "Callable[[VersionSets], VersionSets]", description: str, state: Path, gateways: str) -> None:
    with output.sentences():
        after = _operated(operation, description, client.stack_of(state), gateways)
    _say(after, description)


def _operated(
    operation: "Callable[[VersionSets], VersionSets]", description: str, main: "Stack", gateways: str
) -> "VersionSets":
    """Write the operation, and wait until every gateway applies it."""
    after = staging.control_of(main).write(operation(staging.required(main)), description)
    staging.wait_for_gateways(staging.gateways_of(gateways, main), after.revision, _GO_BY_S)
    return after


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError as exc:
        raise output.usage_error(f"share={text!r} allowed: 0 to 100 %, as 5% or 0.05") from exc


def _part_of(name: str, answer: "gateway_pb2.GetVersionSetsResponse") -> str:
    if name == answer.serving:
        return "serves"
    parts = []
    if answer.canary.name == name:
        parts.append(f"canary of {answer.canary.share:.3g}")
    if answer.shadow.name == name:
        parts.append(f"shadow of {answer.shadow.share:.3g}")
    if answer.before == name:
        parts.append("served before")
    return ", ".join(parts) or "staged"


def _shadow_text(name: str, shadow: "gateway_pb2.ShadowReport") -> str:
    return (
        f"shadow {name}: {shadow.requests:,} requests ({shadow.failed:,} failed, {shadow.skipped:,} left out), "
        f"{shadow.overlap:.0%} of the items are the same, best score {shadow.score_shift:+.3f}, "
        f"{shadow.median_ms:.0f} ms (p99 {shadow.p99_ms:.0f}); of {shadow.taken:,} items taken next the answer had "
        f"{shadow.taken_from_answer:,}, the shadow {shadow.taken_from_shadow:,}"
    )


def _say(after: "VersionSets", description: str) -> None:
    facts = {"revision": after.revision, "serving": after.serving, "sets": sorted(after.sets)}
    output.answer(facts, f"{description}  (revision {after.revision}, {after.serving} serves)")
