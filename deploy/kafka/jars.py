"""Apache Kafka's jars, from Maven Central by jgo: `jars.py fetch FOLDER` and `jars.py lock`.

`fetch` downloads what jars.txt lists and refuses a jar whose SHA-256 differs. `lock` resolves ROOTS again and writes a
new jars.txt. FRESHET_MAVEN_REPOSITORY is the address of a mirror, to be used instead of Maven Central. It runs with the
packages of requirements.txt on the path: the launcher does that, and for `lock` an environment made from that file.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import truststore

truststore.inject_into_ssl()  # the system's certificates, as pip uses them

from jgo.maven import MavenContext  # noqa: E402

LOCK = Path(__file__).parent / "jars.txt"
# 4.3.1 is the newest release that is complete (November 2026: of 4.4.0 the kafka-tools-api jar, which kafka_2.13
# depends on, is missing). docker-compose.yml names the same version; a test compares the two.
ROOTS = (
    "org.apache.kafka:kafka_2.13:4.3.1",
    # Kafka's own distribution binds SLF4J 1.7 to Log4j with this; without it the broker logs nothing.
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
)


def fetch(folder: Path) -> None:
    """Every jar of jars.txt into `folder`. Raises: SystemExit when one is not what was locked."""
    folder.mkdir(parents=True, exist_ok=True)
    locked = [line.split() for line in LOCK.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(4) as pool:
        context = _context(Path(cache))
        found = pool.map(lambda entry: _download(context, entry[0]), locked)
        for (coordinate, sha256), jar in zip(locked, found, strict=True):
            if (actual := _sha256(jar)) != sha256:
                raise SystemExit(f"{coordinate}: SHA-256 is {actual}; jars.txt says {sha256}")
            shutil.move(jar, folder / jar.name)


def lock() -> None:
    """Write jars.txt for ROOTS."""
    with tempfile.TemporaryDirectory() as cache:
        context = _context(Path(cache))
        # "!": of several versions the one nearest to the root counts, as in Maven, and no root manages the others'.
        roots = [context.create_dependency(f"{root}!") for root in ROOTS]
        _, found = context.resolver.resolve(roots)
        needed = [jar for jar in found if jar.scope in ("compile", "runtime")]
        coordinates = sorted({*ROOTS, *(f"{jar.groupId}:{jar.artifactId}:{jar.version}" for jar in needed)})
        lines = [f"{coordinate} {_sha256(_download(context, coordinate))}" for coordinate in coordinates]
    LOCK.write_text("\n".join(["# Written by `jars.py lock`: Kafka's jars and their SHA-256.", *lines, ""]))


def _context(cache: Path) -> MavenContext:
    mirror = os.environ.get("FRESHET_MAVEN_REPOSITORY")
    return MavenContext(repo_cache=cache, remote_repos={"mirror": mirror} if mirror else None, timeout=60)


def _download(context: MavenContext, coordinate: str) -> Path:
    group, name, version = coordinate.split(":")
    return Path(context.project(group, name).at_version(version).artifact().resolve())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fetch", folder]:
            fetch(Path(folder))
        case ["lock"]:
            lock()
        case _:
            raise SystemExit(__doc__)
