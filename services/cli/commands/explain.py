"""`freshet explain USER ITEM`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from services.cli import client, options
from services.cli.output import CommandError, answer, duration, echo, json_command, table

if TYPE_CHECKING:
    from freshet_client import Explanation

_BAR = 30


@json_command
def explain(
    user: options.UserId,
    item: Annotated[str, Argument(help="Item id.")],
    *,
    items: options.Sequence = "",
    max_pairs: Annotated[int, Option(min=0, help="Component pairs, largest first; 0: all.")] = 6,
    rules: Annotated[Path | None, Option(help="Rules of the request: a YAML file (docs/guide/rules.md).")] = None,
    gateway: options.Gateway = options.DEFAULT_GATEWAY,
    timeout_ms: options.TimeoutMs = 2000,
) -> None:
    """Explain an item's score for a user.

    [bold]model[/] is the trained score; [bold]refreshed[/] is the effect of later interactions with the item (PEFA-XS);
    [bold]votes[/] come from remembered interactions of users in a similar state (PEFA-XL) and from neighbours of the
    user's last items. The output lists rules that name the item, with their effect on the score. The exit
    status is 1 if the user has no state: Recommend would answer popular items, which have no score.

    Example:  freshet explain 42 1193

    Example:  freshet explain me 1193 --items 661,914 --max-pairs 0
    """
    from freshet.v1 import gateway_pb2

    request = gateway_pb2.ExplainRequest(
        user_id=user,
        item_id=item,
        history=client.history_of(client.split_ids(items)),
        max_pairs=max_pairs,
        rules=client.rules_of(rules),
    )
    found = client.ask(gateway, "Explain", request, timeout_ms)
    if found.state_source == "none":
        raise CommandError(
            f"nothing is known of user {user}: there is no score to explain, Recommend would answer popular items",
            advice=f"freshet record --user {user} --item {item}, then ask again",
        )
    facts = _facts(found, user=user, item=item)
    answer(facts, lambda: _print(facts))


def _facts(found: "Explanation", *, user: str, item: str) -> dict[str, Any]:
    from freshet_client import ExplainedVotes

    facts = asdict(found)
    similarity = facts["similarity"]
    votes = facts["votes"] = facts["votes"] or asdict(ExplainedVotes(0.0, 0, 1.0, (), ""))
    for one in (similarity, *facts["history"]):
        one["title"] = one["title"] or None
    return {
        "user_id": user,
        "item_id": item,
        "title": similarity.pop("title"),
        "shares": {name: facts.pop(f"share_of_{name}") for name in ("model", "refreshed", "votes")},
        **facts,
        "index_version": similarity.pop("index_version"),
        "votes_index_version": votes.pop("index_version"),
    }


def _effect(rule: dict[str, Any]) -> str:
    if rule["pin"]:
        return f"the best of its items stands at position {rule['pin']}"
    return f"at most {rule['cap']} of its items" if rule["cap"] else f"{rule['adds']:+.4f}"


def _print(facts: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    title = f"{facts['title']} ({facts['item_id']})" if facts["title"] else facts["item_id"]
    score = (f"{facts['score']:.4f}", "bold")
    echo(Text.assemble(score, f"  {title}, for user {facts['user_id']}"))
    similarity, votes = facts["similarity"], facts["votes"]
    of_s = votes["model_share"]
    parts = Table.grid(padding=(0, 2))
    changed = f"{similarity['num_interactions']} interactions changed the item state; λ {similarity['model_share']:.2f}"
    voted = f"of {votes['num_neighbours']} nearest remembered and of item neighbours; λ {of_s:.2f}"
    for name, value, style, says in (
        ("model", of_s * similarity["from_model"], "cyan", "the trained score"),
        ("refreshed", of_s * similarity["from_interactions"], "green", changed),
        ("votes", (1 - of_s) * votes["vote"], "magenta", voted if of_s < 1 or votes["num_neighbours"] else "no votes"),
    ):
        share = facts["shares"][name]
        parts.add_row(name, f"{value:+.4f}", f"{share:4.0%}", Text("█" * round(_BAR * share), style), Text(says, "dim"))
    echo(parts)
    for rule in facts["rules"]:
        echo(f"rule {rule['name']}: {_effect(rule)}")
    if any(rule["adds"] for rule in facts["rules"]):
        echo(Text.assemble("with rules ", (f"{facts['score_with_rules']:.4f}", "bold")))
    if similarity["pairs"]:
        columns = ("user part", "item part", "weight", "cosine", "adds", "of it model")
        numbers = ("weight", "cosine", "contribution", "from_model")
        rows = (
            (str(pair["query_component"]), str(pair["item_component"]), *(f"{pair[name]:.4f}" for name in numbers))
            for pair in similarity["pairs"]
        )
        echo(table(*columns, rows=rows, right=columns, title="component pairs, largest first"))
    for voters in votes["voters"]:
        echo(
            f"voted: {voters['count']} x {voters['type']}, {duration(voters['newest_age_seconds'])} to "
            f"{duration(voters['oldest_age_seconds'])} old, {voters['vote']:+.4f}"
        )
    if facts["history"]:
        past = ", ".join(
            f"{event['title'] or event['item_id']} ({duration(event['age_seconds'])})" for event in facts["history"]
        )
        echo(f"the state is computed from: {past}")
    versions = f"model {facts['model_version']} · index {facts['index_version']}"
    echo(f"{versions} · state {facts['state_source']}", style="dim")
