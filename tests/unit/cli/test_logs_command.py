"""`freshet logs` shows the newest lines of each part, and goes on with what is written."""

import subprocess
import sys
import threading
from pathlib import Path

from typer.testing import CliRunner

from services.cli.main import app


def state_of(folder: Path) -> Path:
    for path, text in (
        ("logs/gateway.log", "one\ntwo\n\x1b[2Jthree\n"),
        ("logs/redis.log", "ready\n"),
        ("shards/0-of-2-replica-0/logs/candidates.log", "shard\n"),
        ("sets/next/stack/logs/candidates.log", "set\n"),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def run(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["logs", *arguments])
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_the_newest_lines_of_one_part_and_of_all_are_shown(tmp_path: Path) -> None:
    state = str(state_of(tmp_path))
    assert run("gateway", "--lines", "2", "--state", state) == ["two", "[2Jthree"]
    assert run("candidates", "--state", state) == ["candidates 0-of-2-replica-0 shard", "candidates next set"]
    assert run("--lines", "1", "--state", state) == [
        "gateway [2Jthree", "redis ready", "candidates 0-of-2-replica-0 shard", "candidates next set",
    ]  # fmt: skip


def test_a_part_without_a_log_is_named_with_those_that_have_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["logs", "gatway", "--state", str(state_of(tmp_path))])
    assert result.exit_code == 2
    assert "process='gatway' has no log in" in result.stderr
    assert "allowed: candidates, gateway, redis" in result.stderr


def test_follow_shows_what_is_written_later_also_to_a_log_begun_anew(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    command = [sys.executable, "-m", "services.cli", "logs", "redis", "--follow", "--state", str(state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        deadline = threading.Timer(60, following.kill)
        deadline.start()
        seen = [following.stdout.readline()]
        with (state / "logs" / "redis.log").open("a") as log:
            log.write("later\nhal")
            log.flush()
            seen.append(following.stdout.readline())
            log.write("f\n")
            log.flush()
            seen.append(following.stdout.readline())
        (state / "logs" / "redis.log").write_text("anew\n")
        seen.append(following.stdout.readline())
        deadline.cancel()
        following.terminate()
    assert seen == ["ready\n", "later\n", "half\n", "anew\n"]
