"""Make the gRPC stubs from `protos/` at install time (called by `services/client/build_hook.py`, or
`python deploy/build_stubs.py`).

The stubs land in `stubs/freshet/v1`, import as `freshet.v1`, and are shipped in the client's distribution alone. They
are never committed: the protos are the contract. Beside them lies a link to the client's own package.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build_stubs(root: Path = ROOT) -> None:
    """Compile every proto below `root/protos` into `root/stubs`. Raises RuntimeError with protoc's exit status."""
    import grpc_tools
    from grpc_tools import protoc

    out = root / "stubs"
    package = out / "freshet" / "v1"
    package.mkdir(parents=True, exist_ok=True)
    for stale in package.glob("*_pb2*"):
        stale.unlink()
    protos = sorted((root / "protos").glob("freshet/v1/*.proto"))
    includes = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        ["protoc", f"-I{root / 'protos'}", f"-I{includes}"]
        + [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
        + [str(path) for path in protos]
    )
    if status:
        raise RuntimeError(f"protoc failed with exit status {status}")
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()


if __name__ == "__main__":
    build_stubs()
