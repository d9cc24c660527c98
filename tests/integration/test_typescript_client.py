"""The TypeScript client as it is shipped: packed, installed in another folder, and run by Node against a gateway."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from services.algorithms.bundles.model_bundle import load_bundle
from services.stack import Stack
from services.stack.folders import REPOSITORY

# npm fetches its packages.
pytestmark = pytest.mark.timeout(600)
_HERE = Path("services", "client", "typescript")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that has the package; the checkout is not changed."""
    copy, project = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("project")
    built = shutil.ignore_patterns("node_modules", "dist", "gen", "*.tgz")
    shutil.copytree(REPOSITORY / _HERE, copy / _HERE, ignore=built)
    shutil.copytree(REPOSITORY / "protos", copy / "protos")
    run(copy / _HERE, "npm", "install", "--no-audit", "--no-fund")
    run(copy / _HERE, "npm", "pack", "--pack-destination", str(project))
    (package,) = project.glob("*.tgz")
    (project / "package.json").write_text('{"type": "module", "private": true}')
    run(project, "npm", "install", "--no-audit", "--no-fund", "--no-package-lock", package.name)
    shutil.copytree(copy / _HERE / "test", project / "test")
    return project


def run(folder: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def test_the_package_holds_code_and_types_alone(installed: Path) -> None:
    package = installed / "node_modules" / "freshet-client"
    found = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    generated = {f"dist/gen/freshet/v1/{name}_pb" for name in ("candidates", "common", "events", "gateway", "reranker")}
    modules = {"dist/index", "dist/retrying", "dist/session", *generated}
    assert found == {"README.md", "package.json"} | {f"{one}{end}" for one in modules for end in (".js", ".d.ts")}


def test_sessions_keep_their_promises_on_a_real_gateway(installed: Path, compact_stack: Stack) -> None:
    items = list(load_bundle(compact_stack.bundle).item_ids)[:20]
    url = f"http://127.0.0.1:{compact_stack.ports['gateway-http']}"
    told = run(installed, "node", "--test", "test/", FRESHET_URL=url, FRESHET_ITEMS=",".join(items))
    assert "# fail 0" in told or "fail 0" in told
    assert "skipped 0" in told


def test_the_readmes_example_prints_what_it_promises(installed: Path, compact_stack: Stack) -> None:
    (example,) = re.findall(
        r"```ts\n(.*?)```", (REPOSITORY / _HERE / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    url = f"http://127.0.0.1:{compact_stack.ports['gateway-http']}"
    item = json.dumps(next(iter(load_bundle(compact_stack.bundle).item_ids)))
    for written, ours in (("http://127.0.0.1:50080", url), ('"1217"', '"reader-of-the-readme"'), ('"661"', item)):
        assert written in example
        example = example.replace(written, ours)
    (installed / "example.mjs").write_text(example, encoding="utf-8")
    # Node's fetch knows no proxy: one in the environment, of which nothing answers, changes nothing.
    printed = run(installed, "node", "example.mjs", HTTP_PROXY="http://127.0.0.1:9", http_proxy="http://127.0.0.1:9")
    assert re.fullmatch(r"\[( '[^']+',?){3} \] \[\]\n3 -?[\d.]+\n", printed), printed
