"""`freshet keys create | list | revoke`, and `freshet certs`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from services.cli import options
from services.cli.output import CommandError, answer, echo, group_command, json_command, sentences, table, usage_error
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


@json_command
def certs(
    *,
    out: Annotated[Path, Option(help="The folder for certificates and keys.")],
    host: Annotated[list[str] | None, Option(help="Another name or address of the servers; may be repeated.")] = None,
    days: Annotated[int, Option(min=1, max=3650, help="Validity of a certificate in days.")] = 365,
    renew: Annotated[bool, Option("--renew", help="New certificates and keys of the existing CA.")] = False,
) -> None:
    """Make a CA and a certificate for each process, Kafka, Redis, the inference server and an operator.

    Each certificate names its owner, localhost, the loopback addresses and your hosts. Only you can read the keys. To
    renew certificates, use --renew and restart the processes one by one: the CA stays the same, so old and new
    certificates are trusted. For a new CA, use a new folder.

    Example:  freshet certs --out .freshet/certs --host 10.0.0.7

    Example:  freshet certs --out .freshet/certs --renew --days 90
    """
    try:
        from services.cli.certificates import NAMES, CertificatesError, make_certificates
    except ModuleNotFoundError as exc:
        raise usage_error(f"{exc.name} is not installed", "pip install 'freshet-recsys[cli]'") from exc
    try:
        ends = make_certificates(out, hosts=host or (), days=days, renew=renew)
    except CertificatesError as exc:
        advice = "another --out" if renew else "--renew makes new ones under the same CA"
        raise usage_error(str(exc), advice) from exc
    except ValueError as exc:
        raise usage_error(f"host={host!r}: {exc}", "names in ASCII, or addresses") from exc
    folder = out.resolve()
    variables = {
        name: {
            "FRESHET_TLS_CERT": str(folder / f"{name}.crt"),
            "FRESHET_TLS_KEY": str(folder / f"{name}.key"),
            "FRESHET_TLS_CA": str(folder / "ca.crt"),
        }
        for name in NAMES
    }
    lines = [f"{len(variables)} certificates, good until {ends:%Y-%m-%d}. Keep ca.key where no process runs."]
    for name, values in variables.items():
        lines += ["", f"# {name}", *(f"{variable}={value}" for variable, value in values.items())]
    answer({"good_until": ends.isoformat(), "variables": variables}, "\n".join(lines))
