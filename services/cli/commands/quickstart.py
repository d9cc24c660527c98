"""`freshet quickstart`: show a first answer within a minute, and the effect of one event on it.

It starts the compact profile without refresher and generator, in its own state folder. The model is trained once and
stored in the user's cache.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from services.cli import client, options
from services.cli.output import CommandError, answer, echo, json_command, sentences, stack_progress, table

if TYPE_CHECKING:
    from freshet_client import Recommendation

    from services.algorithms.bundles.model_bundle import Bundle
    from services.stack import Stack
    from services.stack.components.component import Say

DEFAULT_STATE = Path(".freshet/quickstart")
# The parts needed for answers; `freshet up` adds the refresher (events change all users' items) and the generator
# (search).
_PARTS = ("kafka", "redis", "encoder", "gateway")
_K = 5


@json_command
def quickstart(
    *,
    state: Annotated[Path, Option("--state", help="Its state folder; no other stack may use it.")] = DEFAULT_STATE,
    port_offset: options.PortOffset = 0,
) -> None:
    """Start the smallest system that answers, request recommendations, record one event, and request them again.

    The first run trains a small model on MovieLens latest-small, or on simulated users if this machine lacks the data.
    The system continues to run; the last line shows how to stop it.

    Example:  freshet quickstart
    """
    from services.stack import Ports, Stack

    began = time.monotonic()
    with sentences(), stack_progress() as say:
        ports = Ports.default(offset=port_offset) if port_offset else None
        with _model(state, say) as bundle:
            stack = Stack(state, bundle=bundle, profile="compact", ports=ports, say=say)
            stack.up(_PARTS[:2])
        stack.up(_PARTS)
    result = _ask(stack, began)
    answer(result, lambda: _print(result, stack, state))


@contextmanager
def _model(state: Path, say: "Say") -> Iterator[Path]:
    """Yield the folder of the trained bundle. The folder is complete after the block.

    Training runs in a separate process, so that Kafka can start meanwhile and PyTorch's memory is freed at the end.
    """
    from services.algorithms.bundles import model_manifest
    from services.offline import quickstart as training
    from services.stack.folders import cache_root, recipe_key

    data = training.data_here()
    key = recipe_key(Path(training.__file__), Path(model_manifest.__file__))
    folder = cache_root() / "quickstart" / f"{data}-{key}"
    if folder.exists():
        yield folder
        return
    aside, log = folder.with_name(f"{folder.name}.{os.getpid()}"), state / "logs" / "training.log"
    for one in (aside.parent, log.parent):
        one.mkdir(parents=True, exist_ok=True)
    say("model", f"training on {data}")
    began = time.monotonic()
    with log.open("w") as written:
        command = [sys.executable, "-m", training.__name__, str(aside)]
        trained = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
    try:
        yield folder
        if trained.wait():
            *_, last = ("its log is empty", *log.read_text(errors="replace").split("\n")[:-1])
            raise CommandError(f"the model could not be trained: {last}", advice=f"{log} has all of it")
        if not folder.exists():
            aside.rename(folder)
        say("model", f"ready after {time.monotonic() - began:.1f} s")
    finally:
        trained.kill()
        trained.wait()
        shutil.rmtree(aside, ignore_errors=True)


def _ask(stack: "Stack", began: float) -> dict[str, Any]:
    """Act as a new user: like three items, request recommendations, like another item and request them again."""
    from services.algorithms.bundles.model_bundle import load_bundle

    bundle = load_bundle(stack.bundle, verify=False)
    titles = dict(zip(bundle.item_ids, bundle.titles, strict=True))
    liked, other = _choose(bundle)
    with client.gateway(stack.address("gateway")) as gateway:
        session = gateway.session(f"you-{uuid.uuid4().hex[:6]}")
        for item_id in liked:
            session.record(item_id, "like")
        before = session.recommend(k=_K)
        seconds = time.monotonic() - began
        session.record(other, "like")
        asked = time.monotonic()
        after = session.recommend(k=_K)
        fresh_ms = 1000 * (time.monotonic() - asked)
    running = [part for part in stack.status() if part.running]
    return {
        "data": bundle.manifest.data.get("source") or bundle.manifest.data.get("name"),
        "model_version": bundle.model_version,
        "user_id": session.user_id,
        "liked": [titles[item_id] for item_id in liked],
        "before": _rows(before, titles),
        "liked_next": titles[other],
        "after": _rows(after, titles),
        "token_honoured": after.token_honoured,
        "seconds_to_first_answer": round(seconds, 1),
        "second_answer_ms": round(fresh_ms, 1),
        "memory_mb": {part.name: part.memory_mb for part in running},
        "curl": _curl(stack, session.user_id, liked[0], after.item_ids[0]),
    }


def _rows(answer: "Recommendation", titles: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"item_id": one.item_id, "title": titles.get(one.item_id), "score": round(one.score, 4), "source": one.source}
        for one in answer.items
    ]


def _choose(bundle: "Bundle") -> tuple[list[str], str]:
    """Return three popular items that share a category, and a popular item with none of their categories."""
    by_popularity = [int(item) for item in (-bundle.counts).argsort(kind="stable")]
    categories = [set(of_item) for of_item in bundle.categories]
    # The rarest category of the most popular item describes the most specific taste.
    sizes = {name: sum(name in of_item for of_item in categories) for name in categories[by_popularity[0]]}
    shared = min(sizes, key=lambda name: (sizes[name], name))
    liked = [item for item in by_popularity if shared in categories[item]][:3]
    theirs = set().union(*(categories[item] for item in liked))
    other = next(item for item in by_popularity if item not in liked and not categories[item] & theirs)
    return [bundle.item_ids[item] for item in liked], bundle.item_ids[other]


def _curl(stack: "Stack", user_id: str, item_id: str, best: str) -> list[str]:
    url = f"http://127.0.0.1:{stack.ports['gateway-http']}/freshet.v1.GatewayService"
    bodies = (
        ("Recommend", f'{{"userId": "{user_id}", "k": 3}}'),
        (
            "RecordInteractions",
            f'{{"interactions": [{{"userId": "{user_id}", "itemId": "{item_id}", "type": "like"}}]}}',
        ),
        ("Explain", f'{{"userId": "{user_id}", "itemId": "{best}"}}'),
    )
    return [f"curl --json {shlex.quote(body)} {url}/{method}" for method, body in bodies]


def _print(result: Mapping[str, Any], stack: "Stack", state: Path) -> None:
    echo(f"Model {result['model_version']}, one epoch on {result['data']}.")
    echo(f"\n{result['user_id']} likes {'; '.join(result['liked'])}. Recommended:")
    echo(_table(result["before"]))
    echo(f"\nThen they like {result['liked_next']}. {result['second_answer_ms']:.0f} ms later:")
    echo(_table(result["after"], result["before"]))
    if not result["token_honoured"]:
        echo("The event is not in this answer yet: ask again in a moment.", style="yellow")
    memory = sum(result["memory_mb"].values())
    echo(
        f"\nFirst answer {result['seconds_to_first_answer']:.0f} s after the command; {memory:,.0f} MB resident in "
        f"{len(result['memory_mb'])} parts. It keeps running, gRPC at {stack.address('gateway')}. Ask it yourself:\n"
    )
    for line in result["curl"]:
        echo(line)
    where = f" --state {shlex.quote(str(state))}"
    echo(f"\nSearch, and learning from everybody's events:  freshet up{where}")
    echo(f"Stop:  freshet down{where}")


def _table(rows: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]] | None = None) -> Any:
    earlier = {row["item_id"]: str(rank) for rank, row in enumerate(before or (), start=1)}
    columns = ("", "title", "score", "rank before") if before else ("", "title", "score")
    cells = (
        (str(rank), row["title"] or row["item_id"], f"{row['score']:.4f}", earlier.get(row["item_id"], "new"))
        for rank, row in enumerate(rows, start=1)
    )
    return table(*columns, rows=(row[: len(columns)] for row in cells), right=("", "score", "rank before"))
