"""A rolling deploy: every process of a running stack is replaced by another checkout's, old beside new, under load.

    python tests/rolling/deploy.py --old COMMIT

The stack starts with the old code. Then every process, one after the other, is stopped and started with this checkout's
code, and afterwards, in another order, with the old one's again. Nothing may be degraded but by the process that is
away at that moment, and nothing may fail but while the only gateway is. Outside CI: it takes some minutes.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import typer

from services.algorithms.bundles.model_bundle import load_bundle
from services.gateway.domain import Degradation
from services.offline.backfill.jobs import import_interactions
from services.offline.datasets.simulator import SimulatorConfig, simulate
from services.offline.training.run import run_training
from services.stack import Ports, Stack
from tests.integration.model_traffic import PROGRAM, Answer, Load

REPOSITORY = Path(__file__).resolve().parents[2]
PEOPLE = SimulatorConfig(num_users=300, num_items=400, num_topics=16, mean_events_per_user=40, seed=7)
# Which marks an answer may carry while a part is away; docs/operate/operations.md has the table.
EXPLAINED = {
    "candidates": {Degradation.POPULAR_FALLBACK},
    "reranker": {Degradation.FIRST_STAGE_ORDER},
    "encoder": {Degradation.STALE_STATE, Degradation.NOT_FRESH},
    # The new one has not heard of everybody yet.
    "gateway": {Degradation.PARTIAL_CATALOGUE, Degradation.NOT_FRESH},
}
QUIET_S = 3.0
FORTH = ("refresher", "generator", "candidates", "reranker", "encoder", "gateway")
BACK = ("gateway", "encoder", "reranker", "candidates", "generator", "refresher")


@dataclass(frozen=True)
class Swap:
    """A part was away from `began` to `ended` (Unix seconds)."""

    part: str
    to: str
    began: float
    ended: float


def swap(state: Path, part: str, code: Path, to: str) -> Swap:
    """Stop the part and start it with the code of a checkout: by that checkout's own launcher."""
    began = time.time()
    command = f"from services.stack import Stack; s = Stack({str(state)!r}); s.stop({part!r}); s.start({part!r})"
    subprocess.run([sys.executable, "-c", command], cwd=code, check=True, timeout=180)
    # A reader that was refused leaves the part alone for half a second more.
    return Swap(part, to, began, time.time() + 1.0)


def checkout(commit: str, folder: Path) -> Path:
    """The code of a commit, with this checkout's compiled kernels."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, capture_output=True, check=True)
    subprocess.run(["tar", "x"], input=archive.stdout, cwd=folder, check=True)
    for kernel in REPOSITORY.glob("services/**/*.so"):
        shutil.copy(kernel, folder / kernel.relative_to(REPOSITORY))
    return folder


def main() -> int:
    """Deploy forth and back; 1 where something was worse than the part that was away explains."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--old", required=True, help="The commit whose code is old.")
    old = options.parse_args().old
    with tempfile.TemporaryDirectory(prefix="freshet-rolling-") as name:
        folder = Path(name)
        code, people = checkout(old, folder / "old"), simulate(PEOPLE)
        run_training(out=folder / "bundle", interactions=people, epochs=1, split="none", head="mol", threads=1)
        stack = Stack(folder / "state", bundle=folder / "bundle", ports=Ports.free())
        try:
            stack.up()
            import_interactions(
                people,
                bundle=stack.bundle,
                kafka=stack.kafka_bootstrap,
                redis_url=stack.redis_url,
                inference_server=stack.address("inference-server"),
                attributes=False,
            )
            for part in FORTH:
                swap(stack.place.state.root, part, code, "old")
            swaps, answers = _deployed(stack, folder, code, list(people.user_ids))
        finally:
            stack.down()
    bad = [line for answer in answers if (line := _complaint(answer, swaps))]
    typer.echo(f"{len(answers):,} answers, {len(swaps)} processes replaced, {len(bad)} answers worse than explained")
    for one in swaps:
        mine = [answer for answer in answers if one.began <= answer.at < one.ended]
        marked = sum(bool(answer.marks) for answer in mine)
        failed = sum(answer.status != "OK" for answer in mine)
        away = one.ended - one.began
        typer.echo(
            f"{one.part:10} to {one.to}: {away:4.1f} s, {len(mine):3} answers, {marked:3} marked, {failed:3} failed"
        )
    typer.echo("\n".join(bad[:20]))
    return bool(bad)


def _deployed(stack: Stack, folder: Path, old: Path, users: list[str]) -> tuple[list[Swap], list[Answer]]:
    work = folder / "traffic"
    work.mkdir()
    bundle = load_bundle(stack.bundle)
    load = Load(
        gateway=stack.address("gateway"),
        redis=stack.redis_url,
        users=users,
        items=list(bundle.item_ids),
        models=[bundle.model_version],
        recommends_per_s=20.0,
        events_per_s=50.0,
        seconds=900.0,
        seed=0,
    )
    (work / "load.json").write_text(json.dumps(load.__dict__))
    sender = subprocess.Popen([*PROGRAM, str(work)])
    swaps = []
    try:
        time.sleep(QUIET_S)
        for order, code, to in ((FORTH, REPOSITORY, "new"), (BACK, old, "old")):
            for part in order:
                swaps.append(swap(stack.place.state.root, part, code, to))
                time.sleep(QUIET_S)
    finally:
        (work / "stop").touch()
        sender.wait(60)
    return swaps, [Answer(**one) for one in json.loads((work / "traffic.json").read_text())["answers"]]


def _complaint(answer: Answer, swaps: list[Swap]) -> str:
    """What of an answer the part that was away does not explain; "" where nothing is left."""
    ended = answer.at + answer.ms / 1000
    away = {one.part for one in swaps if one.began - 0.1 <= ended and answer.at <= one.ended}
    left = set(answer.marks) - {mark for part in away for mark in EXPLAINED.get(part, set())}
    who = sorted(away) or "nobody"
    if answer.status != "OK" and "gateway" not in away:
        return f"{answer.at:.2f}: {answer.status} while {who} was away"
    return f"{answer.at:.2f}: {[Degradation(mark).name for mark in left]} while {who} was away" if left else ""


if __name__ == "__main__":
    raise SystemExit(main())
