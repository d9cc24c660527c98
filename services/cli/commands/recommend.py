"""The command `freshet recommend` prints recommendations with their provenance.

Titles are shown if the bundle is on this machine.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from services.cli import client, options, output
from services.cli.options import filters

if TYPE_CHECKING:
    from freshet.v1 import common_pb2, gateway_pb2
    from freshet_client import Recommendation

_STAGES = ("queue", "encode", "first_stage", "rerank", "transport", "total")


@output.json_command
@filters
def recommend(
    *,
    user: Annotated[str, Option(help="User id; may be left out with --items.")] = "",
    items: options.Sequence = "",
    k: Annotated[int, Option(help="How many items, 1-1000.")] = 10,
    token: Annotated[str, Option(help="Token of `freshet record`: the answer reflects that write.")] = "",
    include_seen: Annotated[bool, Option("--include-seen", help="Allow items that the user has seen.")] = False,
    allowed: "common_pb2.Filter",
    max_per_category: Annotated[int, Option(min=0, max=1000, help="Most items of a category; 0: no limit.")] = 0,
    diversity: Annotated[float, Option(help="0 to 1. 0: order by score; higher: prefer unlike items.")] = 0.0,
    query: Annotated[str, Option(help="Words; the items that they find are ranked, too.")] = "",
    page_depth: Annotated[int, Option(min=0, max=1000, help="Number of items of all pages.")] = 0,
    page_token: Annotated[str, Option(help="Page token of an earlier page.")] = "",
    not_again_answers: Annotated[int, Option(min=0, max=50, help="Leave out items of this many earlier answers.")] = 0,
    not_again_minutes: Annotated[int, Option(min=0, max=1440, help="Leave out items of so many minutes' answers.")] = 0,
    rules: Annotated[Path | None, Option(help="A YAML file of rules (docs/guide/rules.md).")] = None,
    max_gap: Annotated[float | None, Option(help="Largest gap that the answer is proven to have; 0: exact.")] = None,
    as_of: options.AsOf = "",
    context: options.Context = None,
    bundle: options.BundlePath = options.DEFAULT_BUNDLE,
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 2000,
    batch: Annotated[Path | None, Option(help="A Parquet table with a column user_id: answer for each.")] = None,
    out: Annotated[Path | None, Option(help="With --batch: the Parquet table of answers.")] = None,
) -> None:
    """Recommend items for a user, for a sequence of items, or for many users.

    Example:  freshet recommend --user 42 --k 10

    Example:  freshet recommend --items 1193,661,914 --deny-categories Horror

    Example:  freshet recommend --batch users.parquet --out answers.parquet
    """
    if (batch is None) != (out is None):
        raise output.usage_error("--batch and --out go together", "--batch users.parquet --out answers.parquet")
    if batch is not None and (user or items or token or page_depth or page_token):
        raise output.usage_error("--batch goes without --user, --items, --token and pages", "see --help for an example")
    if not user and not items and batch is None:
        advice = "freshet recommend --user 42, or freshet recommend --items 1193,661,914"
        raise output.usage_error("neither --user, --items nor --batch is given", advice)
    client.check_k(k)
    from freshet.v1 import gateway_pb2

    allowed.exclude_seen = not include_seen
    not_again = gateway_pb2.NotAgain(answers=not_again_answers, minutes=not_again_minutes)
    request = gateway_pb2.RecommendRequest(
        user_id=user,
        k=k,
        filter=allowed,
        context=client.parse_context(context or []),
        history=client.history_of(client.split_ids(items)),
        freshness_token=client.parse_token(token) if token else None,
        max_per_category=max_per_category,
        diversity=diversity,
        query=query,
        page_depth=page_depth,
        page_token=page_token,
        not_again=not_again if not_again_answers or not_again_minutes else None,
        rules=client.rules_of(rules),
        max_gap=max_gap,
    )
    if as_of:
        request.as_of.FromNanoseconds(client.parse_time_ns("as-of", as_of))
    if batch is not None and out is not None:
        _recommend_to_all(batch, out, request, gateway, timeout_ms / 1000)
        return
    found, elapsed_ms = client.timed(gateway, "Recommend", request, timeout_ms)
    facts = _facts(found, client.read_titles(bundle)) | {"elapsed_ms": elapsed_ms}
    output.answer(facts, lambda: _print_answer(facts, subject=f"user {user}" if user else "this sequence"))


def _recommend_to_all(
    users: Path, out: Path, request: "gateway_pb2.RecommendRequest", gateway: str, timeout_s: float
) -> None:
    from services.cli import batch

    with output.sentences():
        found = batch.read_users(users, out)
    with client.gateway(gateway, is_background=True) as asked, output.progress() as update:
        moved = partial(update, "users", total=len(found))
        summary = batch.run(asked, found, request, out, timeout_s=timeout_s, progress=moved)
    sources = ", ".join(f"{count} {source}" for source, count in sorted(summary["state_sources"].items()))
    output.answer(summary, f"{summary['users']} users, model {summary['model_version']}, states: {sources}: {out}")


def _facts(found: "Recommendation", titles: dict[str, str]) -> dict[str, Any]:
    facts = asdict(found)
    proof, of = facts.pop("certificate") or {}, facts.pop("provenance")
    at, stages = of["state_position"], of.pop("stage_times") or {}
    items = [
        {
            "rank": rank,
            "item_id": one.item_id,
            "title": titles.get(one.item_id),
            "score": one.score,
            "source": one.source,
            "rules": list(one.rules),
        }
        for rank, one in enumerate(found.items, start=1)
    ]
    return {
        **facts,
        **of,
        "items": items,
        "state_position": None if at is None else f"{at['partition']}:{at['offset']}",
        "certificate": str(found.certificate or "unspecified"),
        "asked_gap": proof.get("asked_gap"),
        "items_touched": proof.get("items_touched", 0),
        "stages_ms": {name: stages.get(f"{name}_ms", 0.0) for name in _STAGES},
    }


def _print_answer(facts: dict[str, Any], *, subject: str) -> None:
    named = ("title", "id") if any(row["title"] for row in facts["items"]) else ("item",)
    shown = output.table("", *named, "score", "source", right=("", "score"), title=f"for {subject}")
    for row in facts["items"]:
        names = (row["title"] or "-", row["item_id"]) if len(named) == 2 else (row["item_id"],)
        shown.add_row(str(row["rank"]), *names, f"{row['score']:.4f}", ", ".join([row["source"], *row["rules"]]))
    output.echo(shown)
    if not facts["items"]:
        output.echo("no item passes the filters", style="yellow")
    output.echo(_provenance(facts), style="dim")
    if facts["next_page_token"]:
        output.echo(f"next page: --page-token {facts['next_page_token']}")
    output.print_warnings(facts)
    if not facts["token_honoured"]:
        output.echo("the token's event is not reflected yet; ask again in a moment", style="yellow")


def _provenance(facts: dict[str, Any]) -> str:
    age = facts["state_age_seconds"]
    state = f"state {facts['state_source']}"
    if age is not None:
        state += f" {output.duration(age)} old at {facts['state_position']}"
    stages = facts["stages_ms"]
    split = " ".join(f"{name} {stages[name]:.1f}" for name in _STAGES if name != "total")
    index = facts["index_version"] or "not asked"
    if facts["index_freshness"] is not None and facts["index_freshness"]["lag_seconds"] is not None:
        index += f" (lag {output.duration(facts['index_freshness']['lag_seconds'])})"
    proof = facts["certificate"]
    if facts["asked_gap"] is not None:
        proof += f" (asked {facts['asked_gap']:g}: {facts['items_touched']:,} items looked at)"
    return f"model {facts['model_version']} · index {index} · {state} · {proof} · {stages['total']:.1f} ms ({split})"
