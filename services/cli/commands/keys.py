"""`freshet keys create | list | revoke`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from services.cli import options
from services.cli.output import CommandError, answer, echo, group_command, sentences, table
from services.gateway.edge.roles import Role

app = typer.Typer(name="keys", help="API keys of the gateway: create, list and revoke them.", no_args_is_help=True)

_Id = Annotated[str, Argument(help="The key's name, as the audit log shows it.")]
_File = Annotated[Path, Option("--file", envvar="FRESHET_API_KEYS", help="The keys file.")]
_DEFAULT_FILE = options.DEFAULT_STATE / "api-keys.json"


@group_command(app)
def create(
    key_id: _Id,
    *,
    role: Annotated[list[Role], Option(help="May be repeated.")],
    days: Annotated[float | None, Option(min=0, max=36500, help="Valid for this many days [no expiry].")] = None,
    rate: Annotated[float | None, Option(help="Calls per second [unlimited].")] = None,
    burst: Annotated[int | None, Option(help="Burst of calls [one second's].")] = None,
    file: _File = _DEFAULT_FILE,
) -> None:
    """Make a key and print its secret, which is not stored. A running gateway accepts it within two seconds.

    Example:  freshet keys create shop --role recommend --role ingest --days 90 --rate 200
    """
    from datetime import UTC, datetime, timedelta

    from services.gateway.edge.api_keys import create_key

    with sentences(OSError):
        expires = None if days is None else (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)
        secret = create_key(
            file, id=key_id, roles=frozenset(role), expires=expires, requests_per_second=rate, burst=burst
        )
    answer({"id": key_id, "secret": secret}, secret)


@group_command(app, "list")
def list_keys(*, file: _File = _DEFAULT_FILE) -> None:
    """List the keys with their roles, expiry and rates.

    Example:  freshet keys list
    """
    from services.gateway.edge.api_keys import read_keys

    with sentences(OSError):
        rows = [key.model_dump(mode="json", exclude={"sha256"}) for key in read_keys(file)]

    def shown() -> None:
        rates = ["" if rate is None else f"{rate:g}" for rate in (row["requests_per_second"] for row in rows)]
        cells = (
            (row["id"], ", ".join(sorted(row["roles"])), row["expires"] or "", rate)
            for row, rate in zip(rows, rates, strict=True)
        )
        echo(table("id", "roles", "expires", "calls per second", rows=cells))

    answer({"keys": rows}, shown)


@group_command(app)
def revoke(key_id: _Id, *, file: _File = _DEFAULT_FILE) -> None:
    """Revoke a key. A running gateway refuses it within two seconds; running calls end normally.

    Example:  freshet keys revoke shop
    """
    from services.gateway.edge.api_keys import remove_key

    with sentences(OSError):
        if not remove_key(file, key_id):
            raise CommandError(f"{file} has no key {key_id!r}", advice="freshet keys list")
    answer({"revoked": key_id}, f"{key_id} is revoked")
