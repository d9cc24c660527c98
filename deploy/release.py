"""`make release`: everything of a release in dist/, after the built files were tried where nothing else is installed.

The wheels of server and client, the npm package, the notes from CHANGELOG.md, and a bill of materials (CycloneDX) of an
environment that runs every process. Tag and upload are by hand; images come from deploy/Dockerfile.
"""

import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST, BARE = ROOT / "dist", ROOT / "build" / "release"
UV = str(Path(sys.executable).with_name("uv"))
CYCLONEDX = "cyclonedx-bom==7.5.0"
# What all processes need; PyTorch is for training alone.
EXTRAS = "serve,encode,generate,cli,cpu"
# As in docs/guide/clients.md, with the gateway in memory.
CLIENT = """
from freshet_client import Item
from freshet_client.testing import FakeGateway

gateway = FakeGateway([Item("661", "James and the Giant Peach", ["Animation"]), Item("1", "Toy Story", ["Animation"])])
session = gateway.client().session("1217")
session.record("661", "like")
answer = session.recommend(k=3, page_depth=30)
assert answer.item_ids == ["1"] and answer.token_honoured, answer
assert session.next_page() is None
print("the client records and recommends:", session.explain("1").score)
"""


def main() -> None:
    """Raises: CalledProcessError where a step fails, which says why on stderr."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for folder in (DIST, BARE):
        shutil.rmtree(folder, ignore_errors=True)
    DIST.mkdir()
    for project in (ROOT / "services" / "client", ROOT):
        run(UV, "build", "--quiet", "--wheel", "--out-dir", str(DIST), str(project))
    typescript = ROOT / "services" / "client" / "typescript"
    run("npm", "install", "--no-audit", "--no-fund", cwd=typescript)
    run("npm", "pack", "--silent", "--pack-destination", str(DIST), cwd=typescript)
    (DIST / f"notes-{version}.md").write_text(notes((ROOT / "CHANGELOG.md").read_text(), version))

    client, server = (str(next(DIST.glob(f"{name}-{version}-*.whl"))) for name in ("freshet_client", "freshet_recsys"))
    python = bare("client", client)
    run(str(python), "-c", CLIENT, cwd=BARE)
    python = bare("server", client, f"{server}[{EXTRAS}]")
    for option in ("--version", "--help"):
        run(str(python.with_name("freshet")), option, cwd=BARE)
    bom = str(DIST / f"freshet-{version}.cdx.json")
    run(UV, "tool", "run", "--from", CYCLONEDX, "cyclonedx-py", "environment", str(python), "--output-file", bom)
    print(*sorted(path.name for path in DIST.iterdir()), sep="\n")  # noqa: T201


def notes(changelog: str, version: str) -> str:
    """The changelog's section of this version. Raises: ValueError where there is none."""
    found = re.search(
        rf"^## (?:Unreleased: )?{re.escape(version)}$(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise ValueError(f"CHANGELOG.md has no section of {version}")
    return found[1].strip() + "\n"


def bare(name: str, *wheels: str) -> Path:
    """The Python of a new environment that holds these and what they need, in the tested versions."""
    folder = BARE / name
    venv.create(folder)
    python = folder / "bin" / "python"
    constraints = str(ROOT / "deploy" / "constraints.txt")
    run(UV, "pip", "install", "--quiet", "--python", str(python), "-c", constraints, *wheels)
    return python


def run(*command: str, cwd: Path = ROOT) -> None:
    subprocess.run(command, cwd=cwd, check=True)


if __name__ == "__main__":
    main()
