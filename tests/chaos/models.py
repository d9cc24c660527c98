"""A trial during which an operator stages, warms, shadows, canaries, promotes, rolls back and retires, as it comes.

A command may fail while something is down, with a sentence. In the end the gateway goes by the last record, what it
holds is ready, and every state of either model that is said to reflect its user's history is what that model makes.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engines import WITHIN_S
from real import RealTrial

from services.contracts.operation_log import Control
from services.contracts.topics.version_sets import OPERATIONS, VersionSets
from services.stack import Stack, StackError
from services.stack.version_sets import find_set, remove_set, set_names


class ModelTrial(RealTrial):
    """As its base, with an operator beside. `operations`: what was done, and whether it was done or refused."""

    def __init__(self, stack: Stack, seed: int) -> None:
        super().__init__(stack, seed)
        self.bundles = [Path(os.environ[name]).resolve() for name in ("FRESHET_CHAOS_BUNDLE", "FRESHET_CHAOS_NEXT")]
        self.operations: list[tuple[str, bool]] = []
        self._over = threading.Event()
        self._operator = threading.Thread(target=self._operate)

    def run(self) -> dict[str, Any]:
        self._operator.start()
        try:
            found = super().run()
        finally:
            self._over.set()
            self._operator.join(300)
        return found | {"operations": [what if done else f"{what} (refused)" for what, done in self.operations]}

    def _do(self, kind: str) -> None:
        """Half of the kills of what a set has of its own are of the set's."""
        what, _, part = kind.partition(" ")
        if what == "SIGKILL" and part in ("candidates", "reranker", "refresher") and self.rng.random() < 0.5:
            kind = f"{kind} of a set"
            self.own = {kind: lambda rng: self._kill_of_set(part, rng)}
        super()._do(kind)

    def _kill_of_set(self, part: str, rng: random.Random) -> dict[str, Any]:
        names = set_names(self.stack)
        # Meanwhile the operator may take the set away.
        with contextlib.suppress(StackError, FileNotFoundError, ValueError):
            for name in names:
                own = find_set(self.stack, name)
                own.kill(part)
                time.sleep(rng.uniform(0.2, 2.0))
                own.start(part)
        return {"sets": len(names)}

    def compare(self) -> None:
        self._over.set()
        self._operator.join(300)
        super().compare()
        self._compare_sets()

    def _operate(self) -> None:
        while not self._over.is_set():
            last = self._last()
            self._do_operation(*self._next(last))
            self._over.wait(self.rng.uniform(0.0, 1.0))

    def _last(self) -> VersionSets | None:
        while True:
            try:
                last = Control(self.stack.kafka_bootstrap, OPERATIONS).read().last
                return None if last is None else last.after
            except Exception:
                if self._over.wait(0.5):
                    return None

    def _next(self, sets: VersionSets | None) -> tuple[str, ...]:
        if sets is None or len(sets.sets) == 1:
            serving = self.bundles[0] if sets is None else Path(sets.sets[sets.serving].bundle)
            (other,) = [path for path in self.bundles if path != serving]
            return "stage", f"set-{self.rng.randrange(10**6)}", "--bundle", str(other)
        (other,) = sets.sets.keys() - {sets.serving}
        name = sets.sets[other].name
        return self.rng.choice(
            [
                ("warm", name, "--share", "1"),
                ("shadow", name, "50%"),
                ("canary", name, f"{self.rng.randrange(0, 100)}%"),
                ("promote", name, "--wait-s", "5"),
                ("promote", name, "--wait-s", "5"),
                ("rollback",),
                ("retire", name),
            ]
        )

    def _do_operation(self, *arguments: str) -> None:
        state = ("--state", str(self.stack.place.state.root), "--json")
        argv = [sys.executable, "-m", "services.cli", "model", *arguments, *state]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        self.operations.append((" ".join(arguments[:1]), done.returncode == 0))
        if "Traceback" in done.stderr + done.stdout:
            self.violations.append(f"freshet model {arguments[0]}: {(done.stderr + done.stdout)[-300:]}")

    def _compare_sets(self) -> None:
        """Within the time to heal, the gateway goes by the record and holds what it names; left-over processes end."""
        sets, until, said = self._last(), time.monotonic() + WITHIN_S, ""
        while sets is not None and time.monotonic() < until:
            argv = [sys.executable, "-m", "services.cli", "model", "list"]
            state = ("--state", str(self.stack.place.state.root), "--json")
            done = subprocess.run([*argv, *state], capture_output=True, text=True, timeout=60, check=False)
            said = (done.stdout or done.stderr)[-500:]
            if done.returncode == 0:
                (held,) = json.loads(done.stdout)["gateways"].values()
                if int(held["revision"]) == sets.revision and all(one.get("ready") for one in held["sets"]):
                    break
            time.sleep(0.5)
        else:
            if sets is not None:
                self.violations.append(f"the gateway is not as revision {sets.revision}: {said}")
        for name in set_names(self.stack):
            if sets is None or name not in sets.sets:
                remove_set(self.stack, name)
