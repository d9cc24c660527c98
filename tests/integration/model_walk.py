"""The operator's walk, by the command line, while traffic goes on; and what the traffic's answers say of it."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.algorithms.bundles.model_bundle import Bundle
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.packed_state import unpack_query_state
from services.contracts.topics.version_sets import VersionSet, VersionSets
from services.stack import Stack
from tests.integration.model_traffic import PROGRAM, Answer, Load
from tests.unit.cli.shell import shown

# So many items' scores of an answer are compared.
_LISTED = 5
# Equal scores differ by float32 rounding: 1e-7. Those of another model, or of warmed items, differ by .008 and more.
_SAME_SCORES = 1e-5


@dataclass(kw_only=True)
class Phase:
    """A stretch of the walk, by the clock (Unix seconds); `commands` say what was done and how long it took."""

    name: str
    began: float
    ended: float = 0.0
    command_s: float = 0.0
    said: Mapping[str, Any] = field(default_factory=dict)


class Operator:
    """Runs `freshet model` on a stack, and waits between its commands."""

    def __init__(self, stack: Stack) -> None:
        self.phases: list[Phase] = []
        self._stack = stack

    def phase(self, name: str, *command: str, then_s: float) -> Phase:
        """Run a command (none: only wait), then wait."""
        phase = Phase(name=name, began=time.time())
        self.phases.append(phase)
        if command:
            phase.said = self.model(*command)
            phase.command_s = time.time() - phase.began
        time.sleep(then_s)
        phase.ended = time.time()
        return phase

    def model(self, *arguments: str) -> Mapping[str, Any]:
        """What `freshet model ARGUMENTS --json` said."""
        command = ("model", *arguments, "--state", str(self._stack.place.state.root), "--json")
        if arguments[0] == "warm":  # it lowers the priority of its process
            argv = [sys.executable, "-m", "services.cli", *command]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=1800, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            printed = done.stdout
        else:
            printed = shown(*command)
        said: Mapping[str, Any] = json.loads(printed.strip().splitlines()[-1])
        return said


def walk(
    stack: Stack,
    bundle: Path,
    load: Load,
    folder: Path,
    *,
    quiet_s: float,
    warm_share: float,
) -> tuple[list[Phase], list[Answer], list[str]]:
    """Every operation once, promote twice, under the load; phases, answers, statuses of failed events."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "load.json").write_text(json.dumps(load.__dict__))
    operator = Operator(stack)
    sender = subprocess.Popen([*PROGRAM, str(folder)])
    try:
        operator.phase("before", then_s=quiet_s)
        operator.phase("stage", "stage", "next", "--bundle", str(bundle), then_s=quiet_s / 2)
        operator.phase("warm", "warm", "next", "--share", str(warm_share), then_s=0)
        operator.phase("shadow", "shadow", "next", "50%", then_s=quiet_s)
        operator.phases[-1].said = operator.model("list")
        operator.phase("canary", "canary", "next", "5%", then_s=2 * quiet_s)
        operator.phase("promote", "promote", "next", then_s=quiet_s)
        operator.phase("rollback", "rollback", then_s=quiet_s)
        operator.phase("promote again", "promote", "next", then_s=quiet_s / 2)
        operator.phase("retire", "retire", "first", then_s=quiet_s)
    finally:
        (folder / "stop").touch()
        sender.wait(60)
    found = json.loads((folder / "traffic.json").read_text())
    return operator.phases, [Answer(**one) for one in found["answers"]], found["events_failed"]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the answers of a walk say. mixed: of those that were checked, how many name an index of another model than
    they name. scored: answers whose scores were compared with those of the first model's bundle; no feedback moves its
    items. misnamed: of these, how many name the first model and have other scores, or name the new one and have the
    first's. wrong: answers of a set that was not their user's at the time. by_new: by phase, the share of answers that
    the new set gave."""

    mixed: int
    checked: int
    scored: int
    misnamed: int
    wrong: int
    by_new: dict[str, float]


def judge(
    phases: Sequence[Phase], answers: Sequence[Answer], first: Bundle, new: Bundle, salted: VersionSets
) -> Judged:
    """Hold every answer against both models and against whose user it was."""
    rows = {item: row for row, item in enumerate(first.item_ids)}
    mixed = checked = scored = misnamed = wrong = 0
    by_new: dict[str, list[bool]] = {phase.name: [] for phase in phases}
    for answer in answers:
        if answer.status != "OK":
            continue
        phase = next(
            (p for p in phases if p.began + p.command_s <= answer.at and answer.at + answer.ms / 1000 <= p.ended), None
        )
        if phase is not None:
            by_new[phase.name].append(answer.model == new.model_version)
            wrong += answer.model != _model_of(phase.name, answer.user, first, new, salted)
        checked += bool(answer.index)
        mixed += bool(answer.index) and not answer.index.startswith(f"{answer.model}.")
        if first.model_version in answer.states and len(answer.items) >= _LISTED:
            scored += 1
            misnamed += (_gap(answer, first, rows) < _SAME_SCORES) != (answer.model == first.model_version)
    shares = {name: float(np.mean(found)) if found else 0.0 for name, found in by_new.items()}
    return Judged(mixed=mixed, checked=checked, scored=scored, misnamed=misnamed, wrong=wrong, by_new=shares)


def _model_of(phase: str, user: str, first: Bundle, new: Bundle, salted: VersionSets) -> str:
    if phase == "canary":
        return new.model_version if salted.set_for(user) == "next" else first.model_version
    return new.model_version if phase in ("promote", "promote again", "retire") else first.model_version


def _gap(answer: Answer, bundle: Bundle, rows: Mapping[str, int]) -> float:
    """Return the mean distance of the answer's scores from the bundle's own; infinite if it lacks the items."""
    listed = [item for item in answer.items if item in rows][:_LISTED]
    if len(listed) < _LISTED:
        return float("inf")
    components, gate = (bytes.fromhex(part) for part in answer.states[bundle.model_version])
    head = bundle.manifest.head
    query = unpack_query_state(
        components, gate, num_components=head.num_query_components, component_width=head.component_width
    )
    if bundle.absence is not None:
        query = bundle.absence.apply(query, answer.absence_bucket)
    states = bundle.item_states.take(np.array([rows[item] for item in listed]))
    own = MolScorer(states, bundle.pair_gate).scores(query)[0]
    served = dict(zip(answer.items, answer.scores, strict=True))
    return float(np.mean(np.abs(own - np.array([served[item] for item in listed]))))


def canary_of(first: str, new: str, salt: str, share: float) -> VersionSets:
    """The sets as they were during the canary."""
    sets = VersionSets.of_one(VersionSet(name="first", model_version=first, bundle=""))
    return sets.staged(VersionSet(name="next", model_version=new, bundle="")).canaried("next", share, salt)
