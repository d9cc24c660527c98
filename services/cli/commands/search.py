"""The commands `freshet search` and `freshet similar` find items by words and items similar to an item.

Search learns from chosen results, which `freshet record --query` records.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from services.cli import client, options
from services.cli.options import filters
from services.cli.output import answer, echo, json_command, print_warnings, table

if TYPE_CHECKING:
    from freshet.v1 import common_pb2
    from freshet_client import SearchAnswer


@json_command
@filters
def search(
    words: Annotated[str, Argument(help="What to look for, 1-1,024 bytes; quote it.")],
    *,
    user: Annotated[str, Option(help="Rank the answer for this user.")] = "",
    k: Annotated[int, Option(help="How many items, 1-1000.")] = 10,
    exclude_seen: Annotated[bool, Option("--exclude-seen", help="Leave out what --user has seen.")] = False,
    allowed: "common_pb2.Filter",
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 2000,
) -> None:
    """Find items by words. `freshet search-vectors` finds items by your own vector.

    Example:  freshet search "space movies with a sense of humour" --user 42
    """
    client.check_k(k)
    from freshet.v1 import gateway_pb2

    allowed.exclude_seen = exclude_seen
    request = gateway_pb2.GatewayServiceSearchRequest(query=words, user_id=user, k=k, filter=allowed)
    found, elapsed_ms = client.timed(gateway, "Search", request, timeout_ms)
    facts = _facts(found) | {"elapsed_ms": elapsed_ms}
    answer(facts, lambda: _print_answer(facts, words, user))


def _facts(found: "SearchAnswer") -> dict[str, Any]:
    facts = asdict(found)
    results = facts.pop("results")
    for one in results:
        one |= {"title": one["title"] or None, "identifier": one["identifier"] or None}
    for one in facts["sources"]:
        one["failure"] = one["failure"] or None
    items = [{"rank": rank, **one} for rank, one in enumerate(results, start=1)]
    return facts | {"items": items, "model_version": found.model_version or None}


def _print_answer(facts: dict[str, Any], words: str, user: str) -> None:
    from rich.text import Text

    title = Text(f"for {words!r}" + (f" and user {user}" if user else ""))
    shown = table("", "title", "id", "score", "found by", right=("", "score"), title=title)
    for row in facts["items"]:
        found = ", ".join(f"{found['source']} {found['rank']}" for found in row["found_by"])
        if row["identifier"] and row["identifier"] != row["title"]:
            found += f" as {row['identifier']!r}"
        shown.add_row(
            str(row["rank"]), Text(row["title"] or "-"), Text(row["item_id"]), f"{row['score']:.4f}", Text(found)
        )
    echo(shown)
    if not facts["items"]:
        echo("nothing was found", style="yellow")
    spent = " ".join(
        f"{one['source']} {'-' if one['failure'] else format(one['milliseconds'], '.1f')}" for one in facts["sources"]
    )
    versions = f"text {facts['text_version'] or '-'}"
    if facts["model_version"]:
        versions += f" · model {facts['model_version']}"
    echo(f"{versions} · {facts['total_ms']:.1f} ms ({spent})", style="dim")
    for one in facts["sources"]:
        if one["failure"]:
            echo(f"{one['source']}: {one['failure']}", style="dim")
    print_warnings(facts)


@json_command
@filters
def similar(
    item: Annotated[str, Argument(help="Item id.")],
    *,
    user: Annotated[str, Option(help="Leave out what this user has seen.")] = "",
    k: Annotated[int, Option(help="How many items, 1-1000.")] = 10,
    allowed: "common_pb2.Filter",
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 2000,
) -> None:
    """List the items most similar to an item. The exact search uses the current index, which includes new items.

    Example:  freshet similar 1193 --k 5
    """
    client.check_k(k)
    from freshet.v1 import gateway_pb2

    allowed.exclude_seen = bool(user)
    request = gateway_pb2.GatewayServiceSimilarRequest(item_id=item, user_id=user, k=k, filter=allowed)
    facts = {"item_id": item, **asdict(client.ask(gateway, "Similar", request, timeout_ms))}
    for rank, one in enumerate(facts["items"], start=1):
        one |= {"rank": rank, "title": one["title"] or None}
    answer(facts, lambda: _print_similar(facts))


def _print_similar(facts: dict[str, Any]) -> None:
    from rich.text import Text

    shown = table("", "title", "id", "similarity", right=("", "similarity"), title=Text(f"like {facts['item_id']}"))
    for one in facts["items"]:
        shown.add_row(str(one["rank"]), Text(one["title"] or ""), Text(one["item_id"]), f"{one['similarity']:.4f}")
    echo(shown)
    echo(f"index {facts['index_version']} · exact · {facts['total_ms']:.1f} ms", style="dim")
    print_warnings(facts)
