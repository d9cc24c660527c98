"""Stage a model as a version set; find and call the stack's record of sets, Kafka, Redis and gateways."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli import client, options
from services.cli.output import CommandError, ExitStatus, sentences, stack_progress

if TYPE_CHECKING:
    from freshet.v1 import gateway_pb2

    from services.contracts.operation_log import Control
    from services.contracts.topics.version_sets import VersionSets
    from services.stack import Stack

_ENOUGH_IN_COMMON = 0.5
_ASK_S = 10.0


def stage_bundle(
    name: str,
    bundle: Path,
    *,
    text: Path | None = None,
    addresses: Mapping[str, Any] | None = None,
    serving: Path | None = None,
    state: Path = options.DEFAULT_STATE,
    gateways: str = "",
    wait_s: float = 120,
) -> "VersionSets":
    """Do the work of `freshet model stage`; return the new record of sets.

    `addresses` are the address fields of `VersionSet`, if the set's processes already run.
    """
    from services.contracts.operation_log import NotKnown
    from services.contracts.topics.version_sets import VersionSet, VersionSets
    from services.stack import Stack, StackError
    from services.stack.version_sets import new_set, remove_set, set_names, set_parts

    with sentences():
        main = Stack(state)
        before = sets_of(main)
        if before is None:
            now = serving or main.bundle
            first = VersionSet(name="first", model_version=client.model_version(now), bundle=str(now.resolve()))
            before = VersionSets.of_one(first)
        new = VersionSet(
            name=name,
            model_version=_checked(bundle, Path(before.sets[before.serving].bundle)),
            bundle=str(bundle.resolve()),
            **(addresses or {}),
        )
        given = (bool(new.candidates), bool(new.reranker), bool(new.refreshers))
        if any(given) and not all(given):
            raise CommandError("give --candidates, --reranker and --refreshers together, or none of them")
        before.staged(new)  # raises before anything is started
        for left in set(set_names(main)) - before.sets.keys():
            remove_set(main, left)  # an interrupted run left this set
        own: Stack | None = None
        if not any(given):
            try:
                with stack_progress() as say:
                    own = new_set(main, name, bundle, text, say)
                    own.up(set_parts(own), timeout_s=wait_s)
            except StackError:
                remove_set(main, name)
                raise
            started = {name: own.address(name) for name in set_parts(own)}
            refresher = started.pop("refresher")
            new = replace(new, refreshers=(refresher,), **started)
        try:
            after = control_of(main).write(before.staged(new), f"stage {name}")
        except NotKnown:
            raise
        except Exception:
            if own is not None:
                remove_set(main, name)
            raise
        wait_for_gateways(gateways_of(gateways, main), after.revision, wait_s, ready=name)
    return after


def set_of(model_version: str, state: Path) -> str:
    """Return the name of the set with this model, or "" if no set has it."""
    with sentences():
        sets = sets_of(client.stack_of(state))
    found = (name for name, one in sets.sets.items() if one.model_version == model_version) if sets else ()
    return next(iter(found), "")


def control_of(main: "Stack") -> "Control[VersionSets]":
    """Return the record of this stack's version sets."""
    from services.contracts.operation_log import Control
    from services.contracts.topics.version_sets import OPERATIONS

    return Control(kafka_of(main), OPERATIONS)


def kafka_of(main: "Stack") -> str:
    """Return FRESHET_KAFKA_BOOTSTRAP, or the local stack's Kafka address if it is not set."""
    return os.environ.get("FRESHET_KAFKA_BOOTSTRAP") or main.kafka_bootstrap


def redis_of(main: "Stack") -> str:
    """Return the URL of FRESHET_REDIS_URL, else the local stack's."""
    return os.environ.get("FRESHET_REDIS_URL") or main.redis_url


def sets_of(main: "Stack") -> "VersionSets | None":
    """Return the newest record of sets, or None if no set was ever staged."""
    last = control_of(main).read().last
    return None if last is None else last.after


def required(main: "Stack") -> "VersionSets":
    """Return the newest record of sets. Raises: CommandError if no set was ever staged."""
    sets = sets_of(main)
    if sets is None:
        raise CommandError("no set was ever staged", advice="freshet model stage NAME --bundle DIR")
    return sets


def gateways_of(named: str, main: "Stack") -> list[str]:
    """Return the named gateways, else the stack's own."""
    return [one.strip() for one in named.split(",") if one.strip()] or [main.address("gateway")]


def ask_gateways(gateways: Sequence[str]) -> "dict[str, gateway_pb2.GetVersionSetsResponse]":
    """Return the version sets of each gateway. Raises: CommandError if a gateway does not answer."""
    from freshet.v1 import gateway_pb2

    answers = {}
    for target in gateways:
        with client.gateway(target) as asked:
            answers[target] = asked.call("GetVersionSets", gateway_pb2.GetVersionSetsRequest(), timeout_s=_ASK_S)
    return answers


def wait_for_gateways(gateways: Sequence[str], revision: int, wait_s: float, *, ready: str = "") -> None:
    """Wait until every gateway applies `revision` or a later one, and the set named `ready`, if any, is ready.

    Raises: CommandError with the problems after `wait_s`.
    """
    until = time.monotonic() + wait_s
    while True:
        problems = {target: _problem(answer, revision, ready) for target, answer in ask_gateways(gateways).items()}
        left = [f"gateway {target}: {why}" for target, why in problems.items() if why]
        if not left:
            return
        if time.monotonic() > until:
            raise CommandError("; ".join(left), status=ExitStatus.UNAVAILABLE)
        time.sleep(0.1)


def _problem(answer: "gateway_pb2.GetVersionSetsResponse", revision: int, ready: str) -> str:
    if answer.revision < revision:
        return f"it applies revision {answer.revision}, not {revision}"
    if not ready:
        return ""
    found = next((one for one in answer.sets if one.set.name == ready), None)
    if found is None:
        return f"it knows no set {ready!r}"
    return "" if found.ready else f"set {ready!r}: {found.problem}"


def _checked(bundle: Path, serving: Path) -> str:
    """Return the model version of a bundle that may replace the serving one.

    Raises: BundleError if shapes or checksums disagree; CommandError if the bundle has less than half of the serving
    model's items, or another max_history or event schema.
    """
    from services.algorithms.bundles.model_bundle import load_bundle

    new, now = load_bundle(bundle), load_bundle(serving, verify=False)
    known, common = len(now.item_ids), len(set(new.item_ids) & set(now.item_ids))
    if common < _ENOUGH_IN_COMMON * known:
        raise CommandError(
            f"{bundle}: has {common:,} of the {known:,} items of {serving}: a model of another catalogue; allowed: half"
        )
    for what, theirs, ours in (
        ("max_history", new.max_history, now.max_history),
        ("event schema", new.event_schema, now.event_schema),
    ):
        if theirs != ours:
            raise CommandError(
                f"{bundle}: its {what} is not the serving model's ({theirs!r:.60} and {ours!r:.60}); the encoder keeps "
                "one history for both",
                advice="train it with the serving model's, or start a separate stack",
            )
    return new.model_version
