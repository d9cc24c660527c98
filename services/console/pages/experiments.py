"""The page Experiments: list, create, start, stop and remove them, and compare what two arms answer to a user."""

import asyncio
from functools import partial
from typing import Any

from freshet.v1 import events_pb2, gateway_pb2

from services.console.access import LOOK
from services.console.elements import (
    area,
    box,
    button,
    entry,
    folded,
    link,
    panel,
    refill,
    text,
    texts,
    two_lists,
    typed,
)
from services.console.frame import Page
from services.contracts.yaml_files import EXAMPLE, parse_experiment

MAX_PEOPLE, LIST = 10, 5
STATES = {1: "created", 2: "running", 3: "stopped"}
_NUMBERS = ("diversity", "max_per_category", "new_item_share", "max_gap")


def settings_of(arm: events_pb2.Arm) -> str:
    """Return an arm's settings as a text."""
    said = [f"{field.name} {value:g}" for field, value in arm.ListFields() if field.name in _NUMBERS]
    said += [f"model {arm.version_set}"] if arm.version_set else []
    said += [f"rule {rule.name}" for rule in arm.rules]
    return ", ".join(said).replace("_", " ") or "the defaults"


class Experiments(Page):
    async def show(self) -> None:
        self._name, self._revision = self.query.get("name", ""), 0
        self._list = box("div", "wide")
        self._apart = box("div", "wide")
        with folded("A new experiment"):
            self._draft = area("The experiment, as for freshet experiments create", EXAMPLE)
            button("Create", self._create, icon="add")
        await self._show_all()

    async def _show_all(self) -> None:
        found = await self.client.call("ListExperiments", gateway_pb2.ListExperimentsRequest())
        self._revision = found.revision
        with refill(self._list):
            if not found.experiments:
                text("p", "There is no experiment yet.", "hint")
            for one in reversed(found.experiments):
                self._panel(one, found.problems.get(one.name, ""))
        self._apart.clear()
        for one in found.experiments:
            if one.name == self._name and one.state == events_pb2.Experiment.STATE_RUNNING:
                self._compare_panel(one)

    def _panel(self, one: events_pb2.Experiment, problem: str) -> None:
        state = STATES[one.state]
        with box("section", f"panel experiment {state}", aria_label=one.name):
            with box("div", "pair"):
                text("h2", one.name)
                text("span", state, "tag")
                mixed = ", both arms in one list" if one.interleaved else ""
                text("span", f"{one.share:.0%} of the users of layer {one.layer}{mixed}", "hint")
            if one.context:
                only = ", ".join(f"{name} {value}" for name, value in one.context.items())
                text("p", f"Only requests with {only}.", "hint isolated")
            if problem:
                text("p", f"This gateway leaves it out: {problem}", "notice")
            texts(f"{arm.name}, {arm.share:.0%}: {settings_of(arm)}" for arm in one.arms)
            with box("div", "row"):
                if state == "created":
                    button("Start", partial(self._change, start=one.name), icon="play_arrow")
                if state == "running":
                    button("Stop", partial(self._change, stop=one.name), icon="stop")
                    text("a", "What differs", "button", href=link("/experiments", name=one.name))
                if state != "running":
                    button("Remove", partial(self._change, remove=one.name), icon="delete")
                if state != "created":
                    text("a", "Results", "button", href=link("/results", name=one.name))

    async def _create(self) -> None:
        (draft,) = await typed(self._draft)
        await self._change(create=parse_experiment(draft, "experiment"))

    async def _change(self, **change: Any) -> None:
        """Change one experiment. The gateway refuses if experiments changed since this page last read them."""
        request = gateway_pb2.ChangeExperimentRequest(expected_revision=self._revision, **change)
        await self.client.call("ChangeExperiment", request)
        await self._show_all()

    def _compare_panel(self, one: events_pb2.Experiment) -> None:
        first, second = one.arms[0].name, one.arms[1].name

        async def compare(said: str) -> None:
            people = list(dict.fromkeys(name for part in said.split(",") if (name := part.strip())))[:MAX_PEOPLE]
            ask = partial(self.client.recommend, k=LIST, with_details=True, context=LOOK)
            asked = [asyncio.gather(*(ask(who, arms={one.name: arm}) for arm in (first, second))) for who in people]
            sides = await asyncio.gather(*asked)
            with refill(lines):
                apart = sum(before.item_ids != after.item_ids for before, after in sides)
                text("p", f"The lists of {apart} of {len(people)} people differ.", "verdict")
                with box("div", "figures"):
                    for who, (before, after) in zip(people, sides, strict=True):
                        two_lists(who, who, (first, before), (second, after))

        with self._apart, panel(f"What {first} and {second} answer to the same people", "What differs"):
            entry("User ids", compare, hint="up to ten, commas between them, then Enter")
            text("p", "Results do not count these looks.", "hint")
            lines = box("div", "wide")
