"""`freshet certs`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from services.cli.output import answer, json_command, usage_error


@json_command
def certs(
    *,
    out: Annotated[Path, Option(help="The folder for certificates and keys.")],
    host: Annotated[list[str] | None, Option(help="Another name or address of the servers; may be repeated.")] = None,
    days: Annotated[int, Option(min=1, max=3650, help="Validity of a certificate in days.")] = 365,
    renew: Annotated[bool, Option("--renew", help="New certificates and keys of the existing CA.")] = False,
) -> None:
    """Make a CA and a certificate for each process, Kafka, Redis, the inference server and an operator.

    Each certificate names its process, localhost, the loopback addresses and your hosts. Only you can read the keys. To
    rotate, use --renew and restart the processes one by one: the CA stays the same, so old and new certificates are
    trusted. For a new CA use a new folder.

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
