"""The door: whom it admits to what, what rates allow, and what stands in the audit log afterwards."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.gateway.edge.api_keys import ApiKey, digest
from services.gateway.edge.door import MAX_REFUSALS, WINDOW_S, AuditLog, Door, TokenBucket
from services.gateway.edge.roles import Role
from services.platform.config import ConfigError
from services.platform.errors import FreshetError, Overloaded, PermissionDenied, Unauthenticated

PEER = "ipv4:10.0.0.7:999"


class Call:
    """A call's context, as far as the door looks at it."""

    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...] | None:
        return self._metadata or None

    def peer(self) -> str:
        return PEER


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def key(key_id: str, *roles: Role, **fields: Any) -> ApiKey:
    """Its secret is "secret of <id>"."""
    return ApiKey(id=key_id, sha256=digest(f"secret of {key_id}".encode()).hex(), roles=frozenset(roles), **fields)


def showing(key_id: str) -> Call:
    return Call(("x-other", "1"), ("authorization", f"Bearer secret of {key_id}"))


class Scene:
    """A door with two clocks and an audit log in a file."""

    def __init__(self, folder: Path, *keys: ApiKey) -> None:
        self.clock, self.wall_clock = Clock(), Clock()
        self.file = folder / "audit.log"
        self.audit = AuditLog(self.file, clock=self.clock)
        self.door = Door(keys, self.audit, clock=self.clock, wall_clock=self.wall_clock)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(
        tmp_path,
        *(key(role, role) for role in Role),
        key("old", Role.RECOMMEND, expires=datetime.fromtimestamp(1010, UTC)),
        key("slow", Role.RECOMMEND, Role.ERASER, requests_per_second=2.0, burst=3),
    )


def refused(door: Door, method: str, call: Call, kind: type[FreshetError]) -> FreshetError:
    with pytest.raises(FreshetError) as caught:
        door(method, call)
    assert type(caught.value) is kind
    return caught.value


def test_a_method_without_a_role_is_open_to_nobody(scene: Scene) -> None:
    for role in Role:
        refused(scene.door, "NewMethod", showing(role), PermissionDenied)


def test_over_its_rate_a_key_is_told_how_long_to_wait_and_others_are_not_touched(scene: Scene) -> None:
    for _ in range(3):
        scene.door("Recommend", showing("slow"))
    error = refused(scene.door, "Recommend", showing("slow"), Overloaded)
    assert (error.retriable, error.retry_after_ms) == (True, 500)
    scene.door("Recommend", showing("recommend"))
    scene.clock.now_s += 0.5
    scene.door("Recommend", showing("slow"))
    refused(scene.door, "Recommend", showing("slow"), Overloaded)


def test_what_is_refused_for_its_role_costs_nothing_of_the_rate(scene: Scene) -> None:
    for _ in range(5):
        refused(scene.door, "PutItems", showing("slow"), PermissionDenied)
    for _ in range(3):
        scene.door("Recommend", showing("slow"))


@pytest.mark.parametrize(("per_second", "burst"), [(0.3, 1), (7.0, 3), (1000.0, 50)])
def test_a_rate_allows_its_burst_and_then_so_many_a_second(per_second: float, burst: int) -> None:
    rate, start_s = TokenBucket(per_second, burst), 1e6
    assert [rate.take(start_s) for _ in range(burst)] == [0.0] * burst
    assert rate.take(start_s) == pytest.approx(1 / per_second, rel=1e-3)
    taken = sum(rate.take(start_s + step / (10 * per_second)) == 0 for step in range(10 * 20 + 1))
    assert taken == 20


def test_a_refusal_is_audited_with_its_reason_and_without_the_secret(scene: Scene) -> None:
    refused(scene.door, "ForgetUser", showing("ingest"), PermissionDenied)
    refused(scene.door, "ForgetUser", Call(("authorization", "Bearer tell-nobody")), Unauthenticated)
    first, second = scene.lines()
    assert (first["key"], first["status"]) == ("ingest", "PERMISSION_DENIED")
    assert first["reason"] == "ForgetUser needs the role eraser; API key ingest has ingest"
    assert second["reason"] == "unknown API key"
    assert "secret" not in scene.file.read_text()
    assert "tell-nobody" not in scene.file.read_text()


def test_a_flood_of_refusals_is_a_few_lines_and_their_number(scene: Scene) -> None:
    for _ in range(1000):
        refused(scene.door, "Recommend", Call(), Unauthenticated)
    # Neither another key nor an eraser's call is hidden by it.
    refused(scene.door, "Recommend", showing("ingest"), PermissionDenied)
    ended = scene.door("ForgetUser", showing("eraser"))
    assert ended is not None
    for _ in range(100):
        ended("OK")
    assert len(scene.lines()) == MAX_REFUSALS + 1 + 100
    scene.audit.end_windows()
    scene.clock.now_s += WINDOW_S
    scene.audit.end_windows()
    scene.audit.end_windows(now=True)
    last = scene.lines()[-1]
    assert (last["key"], last["status"], last["left_out"]) == ("", "UNAUTHENTICATED", 1000 - MAX_REFUSALS)
    assert len(scene.lines()) == MAX_REFUSALS + 1 + 100 + 1
    refused(scene.door, "Recommend", Call(), Unauthenticated)
    assert "left_out" not in scene.lines()[-1]


def test_the_audit_log_may_be_moved_away_and_is_not_everybodys(scene: Scene) -> None:
    refused(scene.door, "Recommend", Call(), Unauthenticated)
    assert scene.file.stat().st_mode & 0o007 == 0
    scene.file.rename(scene.file.with_suffix(".1"))
    refused(scene.door, "Recommend", Call(), Unauthenticated)
    assert len(scene.lines()) == 1


def test_without_a_file_the_audit_log_is_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    AuditLog(None).call("eraser", "ForgetUser", PEER, "OK")
    assert json.loads(capsys.readouterr().err)["key"] == "eraser"


def test_a_line_that_cannot_be_written_goes_into_the_log_and_the_call_goes_on(scene: Scene) -> None:
    scene.file.unlink()
    scene.file.mkdir()
    with capture_logs() as logs:
        refused(scene.door, "Recommend", Call(), Unauthenticated)
    (entry,) = logs
    assert (entry["event"], entry["status"], entry["log_level"]) == ("audit_log_unwritable", "UNAUTHENTICATED", "error")


def test_an_audit_log_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"FRESHET_AUDIT_LOG='{tmp_path}' allowed: a file to append to \(Is a dir"):
        AuditLog(tmp_path)


def test_other_keys_from_now_on_and_what_was_used_up_stays_used_up(scene: Scene) -> None:
    for _ in range(3):
        scene.door("Recommend", showing("slow"))
    limits = {"requests_per_second": 2.0, "burst": 3}
    scene.door.set_keys([key("slow", Role.RECOMMEND, **limits), key("new", Role.INGEST)])
    refused(scene.door, "Recommend", showing("slow"), Overloaded)
    refused(scene.door, "Recommend", showing("recommend"), Unauthenticated)
    scene.door("RecordInteractions", showing("new"))
    scene.door.set_keys([key("slow", Role.RECOMMEND, **limits | {"burst": 4})])
    scene.door("Recommend", showing("slow"))


def test_the_schemes_case_does_not_matter(scene: Scene) -> None:
    scene.door("Recommend", Call(("authorization", "bearer secret of recommend")))
