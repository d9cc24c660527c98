"""The gateway by HTTP: JSON of the same messages, the same handlers, limits, keys and errors as by gRPC."""

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from freshet.v1 import gateway_pb2, gateway_pb2_grpc
from gateway_scene import Scene
from google.protobuf import json_format
from grpc_health.v1 import health_pb2
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from prometheus_client import CollectorRegistry

from services.gateway.bootstrap import MAX_REQUEST_BYTES
from services.gateway.config import GatewaySettings
from services.gateway.edge.api_keys import Role, create_key
from services.gateway.edge.door import admissions, opened_door
from services.gateway.server import SERVICE
from services.platform.config import ConfigError, load_settings
from services.platform.errors import DependencyUnavailable, FreshetError
from services.platform.http.origins import origins
from services.platform.http.server import HttpServer
from services.platform.rpc import client as rpc_client
from services.platform.rpc.request_counts import OF_CLIENTS
from services.platform.rpc.server import RpcServer

_SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


class Door:
    """Both doors of one gateway: `post` by HTTP, `stub` by gRPC."""

    def __init__(self, port: int, stub: Any, channel: Any) -> None:
        self.port, self.stub, self.channel = port, stub, channel

    async def ask(self, method: str, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        """Without a body: what a browser asks first, and documents."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self._answered(
            urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", None, sent, method=method)
        )

    async def post(
        self, method: str, body: Any, service: str = SERVICE, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {
            "content-type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{service}/{method}", data, sent)
        status, answered, told = await self._answered(request)
        is_json = told.get("content-type", "").startswith("application/json")
        return status, json.loads(answered) if is_json else answered, told

    async def _answered(self, request: urllib.request.Request) -> tuple[int, bytes, dict[str, str]]:
        def call() -> tuple[int, bytes, dict[str, str]]:
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return answer.status, answer.read(), {name.lower(): value for name, value in answer.headers.items()}
            except urllib.error.HTTPError as error:
                return error.code, error.read(), {name.lower(): value for name, value in error.headers.items()}

        return await asyncio.to_thread(call)


@asynccontextmanager
async def doors(scene: Scene, **given: Any) -> AsyncIterator[Door]:
    def add(server: grpc.aio.Server) -> list[str]:
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(scene.servicer, server)
        return [SERVICE]

    settings = GatewaySettings(port=0, metrics_port=0, drain_seconds=0, **given)
    async with opened_door(settings.api_keys, settings.audit_log) as door:
        server = RpcServer(
            process="gateway_test",
            settings=settings,
            add_services=add,
            registry=CollectorRegistry(),
            admissions=admissions(),
            max_request_bytes=MAX_REQUEST_BYTES,
            limits=OF_CLIENTS,
            door=door,
        )
        await server.start()
        http = HttpServer(
            settings=settings,
            port=0,
            services={_SERVICE: scene.servicer, _HEALTH: server.health_servicer},
            guards=server.guards,
            max_request_bytes=MAX_REQUEST_BYTES,
            knows_callers=door is not None,
            origins=origins(settings.origins),
        )
        await http.start()
        async with rpc_client.channel(f"127.0.0.1:{server.port}") as channel:
            yield Door(http.port, gateway_pb2_grpc.GatewayServiceStub(channel), channel)
        await asyncio.gather(server.drain(), http.drain())


async def test_an_answer_is_grpcs_answer_as_json() -> None:
    request = gateway_pb2.RecommendRequest(user_id="ann", k=2)
    async with doors(Scene()) as door:
        by_grpc = await door.stub.Recommend(request, timeout=5, metadata=(("x-request-id", "r-1"),))
        status, answer, told = await door.post("Recommend", {"userId": "ann", "k": 2}, x_request_id="r-1")
        _, by_wire_name, _ = await door.post("Recommend", {"user_id": "ann", "k": 2}, x_request_id="r-1")
        _, binary, _ = await door.post(
            "Recommend", request.SerializeToString(), content_type="application/proto", x_request_id="r-1"
        )
    assert (status, told["content-type"]) == (200, "application/json")
    for found in (
        json_format.ParseDict(answer, gateway_pb2.RecommendResponse()),
        json_format.ParseDict(by_wire_name, gateway_pb2.RecommendResponse()),
        gateway_pb2.RecommendResponse.FromString(binary),
    ):
        for message in (found, by_grpc):
            message.ClearField("stage_times")
            message.ClearField("state_age_seconds")
            message.ClearField("exposure_id")
        assert found == by_grpc


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"userId": "ann", "k": "many"}, 'k="many" allowed: a whole number'),
        ({"userId": "ann", "k": 1.5}, "k=1.5 allowed: a whole number"),
        ({"userId": "ann", "k": 1 << 40}, "k=1099511627776 allowed: a whole number, not negative, 32 bits"),
        ({"userId": "ann", "kk": 2}, "kk=2 is no field of RecommendRequest; allowed: userId, k, filter,"),
        ({"userId": 7}, "userId=7 allowed: a string"),
        ({"userId": "ann", "filter": 3}, "filter=3 allowed: an object"),
        ({"userId": "ann", "filter": {"denyItemIds": "a"}}, 'filter.denyItemIds="a" allowed: a list'),
        (
            {"userId": "ann", "context": {"page": 2}},
            'context={"page": 2} allowed: an object whose values are each a string',
        ),
        ({"userId": "ann", "history": {}}, "history={} allowed: a list"),
        ({"userId": "ann", "history": [{"itemId": "a"}, {"itemId": 3}]}, "history[1].itemId=3 allowed: a string"),
        ({"history": [{"eventTime": "noon"}]}, 'history[0].eventTime="noon" allowed: a time like 2026-01-31T12:00:00Z'),
        ({"userId": "ann", "rules": [None]}, "rules[0]=null allowed: an object"),
        (b"{", "JSON: Expecting property name"),
        (b'{"k": 1, "k": 2}', "JSON: "),
        (b'{"userId": "\xff"}', "JSON: "),
        (["ann"], 'JSON: ["ann"] allowed: an object'),
        (b"[" * 5_000, "JSON: "),
        (rb'{"userId": "\ud83d"}', r'userId="\ud83d" allowed: a string'),
        (rb'{"history": [{"itemId": "\udc00"}]}', r'history[0].itemId="\udc00" allowed: a string'),
        (rb'{"\ud83d": 1}', r"\ud83d=1 is no field of RecommendRequest"),
        (b'{"userId": "\xed\xa0\xbd"}', r'userId="\ud83d" allowed: a string'),
    ],
)
async def test_json_of_the_wrong_shape_is_refused_by_field_and_value(body: Any, says: str) -> None:
    async with doors(Scene()) as door:
        status, error, _ = await door.post("Recommend", body)
        assert (status, error["code"]) == (400, "invalid_argument")
        assert says in error["message"]
        assert (await door.post("Recommend", {"userId": "ann", "k": 2}))[0] == 200


async def test_errors_have_grpcs_words_and_https_status(scene: Scene) -> None:
    scene.interactions.refuse_after, scene.interactions.refusal = 0, DependencyUnavailable("no broker")
    event = {"interactions": [{"userId": "ann", "itemId": "c"}]}
    async with doors(scene) as door:
        status, error, told = await door.post("RecordInteractions", event, x_request_id="r-9")
        assert (status, error["code"]) == (503, "unavailable")
        assert "no broker" in error["message"]
        assert told["x-request-id"] == "r-9"
        assert (await door.post("Recommend", {"userId": "ann", "k": 0}))[1]["message"].startswith("k=0 allowed")
        assert (await door.post("Recommend", {"userId": "ann", "k": 2}, connect_timeout_ms="0"))[0] == 504
        for method in ("NoSuchMethod", "StreamInteractions"):
            status, error, _ = await door.post(method, {})
            assert (status, error["code"]) == (404, "unimplemented")
            assert error["message"].startswith(f"path='/{SERVICE}/{method}' allowed: /")
            assert f"/{SERVICE}/Recommend" in error["message"]
        form = "application/x-www-form-urlencoded"
        status, error, _ = await door.post("Recommend", b"{}", content_type=form)
        assert (status, error["message"]) == (
            415,
            f"content-type={form!r} allowed: application/json, application/proto",
        )
        status, error, _ = await door.post("Recommend", None)
        assert (status, error["message"]) == (405, "method='GET' allowed: POST")
        too_large = b'{"userId": "' + b"a" * MAX_REQUEST_BYTES + b'"}'
        status, error, _ = await door.post("Recommend", too_large)
        assert (status, error["code"]) == (413, "resource_exhausted")


async def test_a_bug_is_told_without_its_text(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:

    async def fails(*_: Any) -> None:
        raise RuntimeError("secret of the house")

    monkeypatch.setattr(type(scene.servicer), "Recommend", fails)
    async with doors(scene) as door:
        status, error, _ = await door.post("Recommend", {"userId": "ann", "k": 2})
    assert (status, error["code"]) == (500, "internal")
    assert "secret" not in error["message"]


async def test_keys_and_roles_are_grpcs(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    reader = create_key(path, id="reader", roles=frozenset({Role.RECOMMEND}))
    secret = reader if isinstance(reader, str) else reader[1]
    async with doors(Scene(), api_keys=path, audit_log=tmp_path / "audit.log") as door:
        assert (await door.post("Recommend", b"{not even JSON"))[0] == 401
        assert (await door.post("Recommend", {"userId": "ann", "k": 2}, authorization=f"Bearer {secret}"))[0] == 200
        status, error, _ = await door.post("ForgetUser", {"userId": "ann", "k": 2}, authorization=f"Bearer {secret}")
        assert (status, error["code"]) == (403, "permission_denied")
    assert "ForgetUser" in (tmp_path / "audit.log").read_text()


async def test_without_keys_a_name_that_leads_here_is_a_stranger() -> None:
    async with doors(Scene()) as door:
        for host in ("evil.example", "evil.example:50080", "", "127.0.0.1.evil.example"):
            assert (await door.post("Recommend", {"userId": "ann", "k": 2}, host=host))[0] == 403, host
        for host in ("localhost", "LOCALHOST:50080", "[::1]:50080"):
            assert (await door.post("Recommend", {"userId": "ann", "k": 2}, host=host))[0] == 200, host


async def test_health_answers_without_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create_key(path, id="reader", roles=frozenset({Role.RECOMMEND}))
    async with doors(Scene(), api_keys=path) as door:
        status, answer, _ = await door.post("Check", {}, service="grpc.health.v1.Health")
    assert (status, answer) == (200, {"status": "SERVING"})


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"service": "no.such"}, {}, (404, "not_found", f"service='no.such' allowed: {SERVICE}, or none")),
        ({"service": 3}, {}, (400, "invalid_argument", "JSON: service=3 allowed: a string")),
        (b"{", {}, (400, "invalid_argument", "JSON: Expecting property name")),
        (b"\xff", {"content_type": "application/proto"}, (400, "invalid_argument", "")),
    ],
)
async def test_a_wrong_question_to_health_is_no_bug(
    body: Any, headers: dict[str, str], expected: tuple[int, str, str]
) -> None:
    async with doors(Scene()) as door:
        status, error, _ = await door.post("Check", body, service="grpc.health.v1.Health", **headers)
        assert (status, error["code"]) == expected[:2]
        assert error["message"].startswith(expected[2])
        assert (await door.post("Check", {"service": SERVICE}, service="grpc.health.v1.Health"))[0] == 200


_PAGE, _OTHER = "https://shop.example", "https://shop.example.evil.example"
_CORS = "access-control-allow-"


def _of_cors(told: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in told.items() if name.startswith("access-control") or name == "vary"}


async def test_a_page_of_an_allowed_origin_is_answered_and_may_read_it() -> None:
    async with doors(Scene(), origins=f"{_PAGE}, http://localhost:3000") as door:
        for origin in (_PAGE, "http://localhost:3000"):
            asked = {"access_control_request_method": "POST", "access_control_request_headers": "content-type"}
            path = f"/{SERVICE}/Recommend"
            status, body, told = await door.ask("OPTIONS", path, origin=origin, **asked)
            assert (status, body, told[f"{_CORS}origin"], told["vary"]) == (204, b"", origin, "origin")
            assert told[f"{_CORS}methods"] == "GET, POST"
            assert {"authorization", "content-type"} <= set(told[f"{_CORS}headers"].split(", "))
            assert f"{_CORS}credentials" not in told
            for method, expected in (("Recommend", 200), ("Nothing", 404)):
                status, _, told = await door.post(method, {"userId": "ann", "k": 2}, origin=origin)
                assert (status, told[f"{_CORS}origin"]) == (expected, origin)
                assert told["access-control-expose-headers"] == "retry-after-ms, x-request-id"
                assert f"{_CORS}credentials" not in told


@pytest.mark.parametrize("origin", [_OTHER, "http://shop.example", f"{_PAGE}:8443", "null", "*"])
async def test_a_page_of_another_origin_is_told_no_and_reads_nothing(origin: str) -> None:
    async with doors(Scene(), origins=_PAGE) as door:
        status, body, told = await door.ask(
            "OPTIONS", f"/{SERVICE}/Recommend", origin=origin, access_control_request_method="POST"
        )
        assert (status, _of_cors(told)) == (403, {"vary": "origin"})
        assert body.decode() == f"origin={origin!r} allowed: those of FRESHET_GATEWAY_ORIGINS\n"
        # A browser does not send this one; a program, or a page behind the same proxy, may.
        status, _, told = await door.post("Recommend", {"userId": "ann", "k": 2}, origin=origin)
        assert status == 200
        assert not [name for name in told if name.startswith("access-control")]


async def test_without_the_setting_no_page_is_answered() -> None:
    async with doors(Scene()) as door:
        asked = {"origin": _PAGE, "access_control_request_method": "POST"}
        status, _, told = await door.ask("OPTIONS", f"/{SERVICE}/Recommend", **asked)
        assert (status, [name for name in told if name.startswith("access-control")]) == (405, [])
        status, _, told = await door.post("Recommend", {"userId": "ann", "k": 2}, origin=_PAGE)
        assert (status, [name for name in told if name.startswith("access-control")]) == (200, [])


async def test_a_page_needs_a_key_where_others_do(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    secret = create_key(path, id="reader", roles=frozenset({Role.RECOMMEND}))
    async with doors(Scene(), api_keys=path, origins=_PAGE) as door:
        asked = {"origin": _PAGE, "access_control_request_method": "POST"}
        assert (await door.ask("OPTIONS", f"/{SERVICE}/Recommend", **asked))[0] == 204
        for given, expected in (({}, 401), ({"authorization": f"Bearer {secret}"}, 200)):
            status, _, told = await door.post("Recommend", {"userId": "ann", "k": 2}, origin=_PAGE, **given)
            assert (status, told[f"{_CORS}origin"]) == (expected, _PAGE)


@pytest.mark.parametrize("value", ["*", "https://*.example", "shop.example", "https://shop.example/", "null"])
def test_an_origin_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FRESHET_GATEWAY_ORIGINS", f"http://localhost:3000,{value}")
    with pytest.raises(ConfigError, match=f"FRESHET_GATEWAY_ORIGINS=.*{re.escape(repr(value))} allowed: scheme://host"):
        load_settings(GatewaySettings)


async def test_the_openapi_document_is_valid_and_names_every_route(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create_key(path, id="reader", roles=frozenset({Role.RECOMMEND}))
    async with doors(Scene(), api_keys=path) as door:
        status, body, told = await door.ask("GET", "/openapi.json")
        assert (status, told["content-type"]) == (200, "application/json")
        document = json.loads(body)
        _, error, _ = await door.post("Nothing", {})
    validate(document)
    assert document["info"]["version"] == "freshet.v1"
    assert sorted(document["paths"]) == error["message"].partition(" allowed: ")[2].split(", ")


async def test_answers_and_requests_are_as_the_openapi_document_says() -> None:
    async with doors(Scene()) as door:
        document = json.loads((await door.ask("GET", "/openapi.json"))[1])
        asked = {
            "Recommend": {
                "userId": "ann",
                "k": 2,
                "context": {"device": "tv"},
                "maxGap": 0.5,
                "history": [{"itemId": "i1"}],
            },
            "Search": {"query": "x", "k": 2},
            "Similar": {"itemId": "i1", "k": 2},
            "RecordInteractions": {"interactions": [{"userId": "ann", "itemId": "i1", "type": "like", "value": 4.0}]},
            "GetFreshness": {},
        }
        for method, request in asked.items():
            operation = document["paths"][f"/{SERVICE}/{method}"]["post"]
            status, answer, _ = await door.post(method, request)
            responses = operation["responses"]
            taken = [(operation["requestBody"], request), (responses.get(str(status), responses["default"]), answer)]
            for part, value in taken:
                assert list(_validator(document, part).iter_errors(value)) == [], (method, value)
            # And a field that there is not is refused by both.
            wrong = {**request, "noSuchField": 1}
            assert (await door.post(method, wrong))[0] == 400
            assert not _validator(document, operation["requestBody"]).is_valid(wrong)


def _validator(document: Any, part: Any) -> Draft202012Validator:
    return Draft202012Validator({**part["content"]["application/json"]["schema"], "components": document["components"]})


def test_every_status_of_ours_has_a_connect_code() -> None:
    from services.platform.http.server import _CODES

    assert {kind.status.name for kind in FreshetError.__subclasses__()} <= _CODES.keys()
