"""`freshet plan`."""

from typing import Annotated, Any

from typer import Option

from services.cli.output import answer, echo, json_command, sentences, table


@json_command
def plan(
    *,
    users: Annotated[int, Option(help="Users with a stored state.")],
    items: Annotated[int, Option(help="Items of the catalogue.")],
    events_per_s: Annotated[float, Option(help="Interactions a second.")],
    recommend_per_s: Annotated[float, Option(help="Recommendations a second.")],
    machine_memory_gb: Annotated[float, Option(help="Memory of one machine, GiB.")] = 64,
    machine_cores: Annotated[int, Option(help="Cores of one machine.")] = 16,
) -> None:
    """Estimate processes, cores, memory, partitions, shards and network from measured unit costs.

    Example:  freshet plan --users 1000000 --items 1000000 --events-per-s 1000 --recommend-per-s 1000
    """
    from services.cli import planning

    with sentences():
        asked = planning.Asked(
            users=users,
            items=items,
            events_per_s=events_per_s,
            recommend_per_s=recommend_per_s,
            machine_memory_gb=machine_memory_gb,
            machine_cores=machine_cores,
        )
    found = planning.plan(asked)
    answer(found, lambda: _print(found))


def _print(found: dict[str, Any]) -> None:
    asked = found["asked"]
    needs = table("process", "number", "cores", "GiB each", "", right=("number", "cores", "GiB each"))
    for one in found["processes"]:
        memory = f"{one['memory_gib']:,.2f}"
        needs.add_row(one["name"], f"{one['processes']:,}", f"{one['cores']:,.1f}", memory, one["obstacle"])
    echo(needs)
    links = table("link", "MB/s", right=("MB/s",))
    for name, rate in found["network_mb_per_s"].items():
        links.add_row(name, f"{rate:,.2f}")
    echo("", links, "")
    echo(
        f"shards: {found['shards']:,} of {found['items_per_shard']:,} items, a search {found['search_ms']:.1f} ms; "
        f"{found['partitions']:,} partitions; {found['cores']:,.0f} cores, {found['memory_gib']:,.0f} GiB: "
        f"{found['machines']:,} machines of {asked['machine_cores']} cores and {asked['machine_memory_gb']:g} GiB"
    )
    growth = ", ".join(f"{name} {value:,.1f}" for name, value in found["growth_gib_per_day"].items())
    echo(f"grows a day, GiB: {growth}")
    if found["extrapolated"]:
        echo("extrapolated: more items in a shard than were measured")
    if any(one["obstacle"] for one in found["processes"]):
        echo("this cannot be built: see the lines with a reason (docs/operate/scale.md)", style="yellow")
    off = f"{found['largest_error']:.0%}"
    echo(f"estimates, off by at most {off} at sizes that were measured but not used for the costs", style="dim")
