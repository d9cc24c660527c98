"""Models: which version set answers which users, a shadow's comparison, and an operator's steps with confirmation."""

from functools import partial

from freshet.v1 import gateway_pb2
from freshet_client import HeldSet, InvalidArgument, ShadowReport, VersionSets
from freshet_client.requests import SetChange

from services.console.elements import box, button, confirmed, entry, folded, panel, refill, text, texts, typed
from services.console.frame import Page
from services.console.snippets import code_of, snippet

# A step waits for Kafka and for this gateway; a promotion also counts the warm users.
STEP_S = 30.0


class Models(Page):
    async def show(self) -> None:
        self._body = box("div", "wide")
        with panel("Stage a model"):
            text("p", "Staging starts processes, and warming makes states of all users: both are commands.", "hint")
            stage = self.settings.command("model stage next --bundle DIR")
            snippet("commands", f"{stage}\n{self.settings.command('model warm next')}")
        with folded("This page as curl and Python"):
            code_of(self, "version_sets", gateway_pb2.GetVersionSetsRequest(), {})
        self._show(await self.client.version_sets())

    def _show(self, found: VersionSets) -> None:
        self._found = found
        with refill(self._body):
            if found.canary or found.before:
                what = f"Set {found.before} answers everybody again. Set {found.serving} stays staged."
                what = f"The canary ends: set {found.serving} answers everybody." if found.canary else what
                with box("div", "row"):
                    button("Roll back", partial(self._take, "roll_back", "", what), icon="undo")
            with box("div", "columns even"):
                for one in found.sets:
                    self._set(one)

    def _set(self, one: HeldSet) -> None:
        name, found = one.set.name, self._found
        with panel(name, f"Set {name}"):
            text("p", part_of(name, found), "verdict")
            text("p", f"Model {one.set.model_version}", "isolated")
            text("p", f"{one.answered:,} answers since this gateway started.", "hint")
            if not one.ready:
                text("p", f"Not ready: {one.problem}", "notice")
            if one.shadow is not None:
                _shadow(one.shadow)
            if name != found.serving:
                self._steps(name)

    def _steps(self, name: str) -> None:
        found = self._found
        users = found.canary.share if found.canary and found.canary.name == name else 0.05
        requests = found.shadow.share if found.shadow and found.shadow.name == name else 0.2
        self._share("shadow", name, requests, "Shadow: % of requests", "is asked beside {} of requests; nobody gets it")
        self._share("canary", name, users, "Canary: % of users", "answers {} of users, always the same ones")
        with box("div", "row"):
            what = f"Set {name} answers everybody. Set {found.serving} stays beside it, so that you can roll back."
            step = partial(self._take, "promote", name, what)
            button("Promote", step, icon="publish", classes="button strong", about=f"Promote {name}")
            what = f"Set {name} is removed. {self.settings.command(f'model retire {name}')} stops its processes."
            step = partial(self._take, "retire", name, what)
            button("Retire", step, icon="delete", about=f"Retire {name}")

    def _share(self, change: SetChange, name: str, share: float, label: str, means: str) -> None:
        async def ask(_: str = "") -> None:
            (value,) = await typed(field)
            try:
                wanted = float(value.strip().removesuffix("%")) / 100
            except ValueError as error:
                raise InvalidArgument.of(label, value, "0 to 100") from error
            await self._take(change, name, f"Set {name} {means.format(percent(wanted))}. 0 ends it.", wanted)

        with box("div", "row end"):
            field = entry(label, ask, value=f"{100 * share:g}")
            button(change.capitalize(), ask, about=f"{change.capitalize()} {name}")

    async def _take(self, change: SetChange, name: str, sentence: str, share: float = 0.0) -> None:
        """Take a step once it is confirmed. The gateway refuses it if the sets changed since this page read them."""
        self.status.say("")
        if not await confirmed([sentence]):
            return
        done = await self.client.change_version_set(
            change, name, expected_revision=self._found.revision, share=share, timeout_s=STEP_S
        )
        late = "" if done.is_applied else " This gateway has not applied it yet: open the page again."
        self.status.say(f"Done: revision {done.revision}.{late}")
        self._show(await self.client.version_sets())


def part_of(name: str, found: VersionSets) -> str:
    """A sentence that says which users or requests a set answers."""
    if name == found.serving:
        share = found.canary.share if found.canary else 0.0
        return f"Answers {percent(1 - share)} of users." if share else "Answers everybody."
    parts = []
    if found.canary and found.canary.name == name:
        parts.append(f"answers {percent(found.canary.share)} of users (canary)")
    if found.shadow and found.shadow.name == name:
        parts.append(f"is asked beside {percent(found.shadow.share)} of requests (shadow)")
    if found.before == name:
        parts.append("answered before the last promotion")
    sentence = ", ".join(parts) or "answers nobody yet"
    return f"{sentence[0].upper()}{sentence[1:]}."


def percent(share: float) -> str:
    """A share in percent, with three digits."""
    return f"{100 * share:.3g}%"


def _shadow(report: ShadowReport) -> None:
    shift = f"best score {report.score_shift:+.3f} beside the answer's"
    had = f"the answer had {report.taken_from_answer:,}, the shadow {report.taken_from_shadow:,}"
    sentences = (
        f"Shadow: {report.requests:,} requests, {report.failed:,} failed, {report.skipped:,} left out",
        f"{report.overlap:.0%} of items in both answers; {shift}",
        f"Time: {report.median_ms:,.0f} ms (p99 {report.p99_ms:,.0f} ms)",
        f"Of {report.taken:,} items that these users took next, {had}.",
    )
    texts(sentences, "")
