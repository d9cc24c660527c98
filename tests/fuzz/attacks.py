"""A list of attacks on the whole stack with API keys on: what one client, or one record, does to everybody else.

python tests/fuzz/attacks.py --bundle BUNDLE [--only NAME ...]

Each attack starts from a running stack on free ports of loopback, in a temporary folder, and prints what another
caller saw. It needs a bundle of a small catalogue with categories (`make demo` leaves one in .freshet/bundle). Exit
status 1 when an attack got through. The last line of stdout is JSON. Letters: ms milliseconds, MB megabytes.
"""

import argparse
import base64
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import paths  # noqa: F401
import psutil
import redis
from freshet.v1 import candidates_pb2, candidates_pb2_grpc, common_pb2, events_pb2, gateway_pb2, gateway_pb2_grpc
from kafka.admin import KafkaAdminClient

from services.algorithms.bundles.model_bundle import load_bundle
from services.contracts.topics import ensure_topics
from services.contracts.topics.index_deltas import INDEX_DELTAS, item_key
from services.contracts.topics.interactions import INTERACTIONS
from services.contracts.topics.items import ITEMS
from services.gateway.edge.api_keys import create_key
from services.gateway.edge.roles import Role
from services.platform.stream.kafka import BulkProducer, Record, partition_for
from services.platform.stream.topic import NUM_PARTITIONS
from services.stack import Ports, Stack

GATEWAY = "/freshet.v1.GatewayService/"
# What another caller's answers may wait beyond the slowest one before the attack, and what memory may stay.
DELAY_MS, KEPT_MB = 50.0, 20.0
MESSAGE_BYTES = 4 << 20
LIMIT = 8
RULES = """
rules:
  - {name: house, item_ids: [ITEM], pin: 1}
  - {name: few, categories: [CATEGORY], cap: 1}
"""


class Scene:
    """A running stack, keys of two roles, and one caller whose answers are timed all the while."""

    def __init__(self, bundle: Path, folder: Path) -> None:
        self.bundle = load_bundle(bundle)
        self.categories = {one: tuple(of) for one, of in zip(self.bundle.item_ids, self.bundle.categories, strict=True)}
        keys = folder / "keys.json"
        secrets = {
            role.value: create_key(keys, id=role.value, roles=frozenset({role}))
            for role in (Role.RECOMMEND, Role.INGEST, Role.OPERATOR)
        }
        os.environ["FRESHET_API_KEYS"] = str(keys)
        pinned = self.bundle.item_ids[0]
        capped = self.categories[self.bundle.item_ids[1]][0]
        (folder / "rules.yaml").write_text(
            RULES.replace("ITEM", json.dumps(pinned)).replace("CATEGORY", json.dumps(capped))
        )
        self.pinned, self.capped = pinned, capped
        settings = {
            "FRESHET_GATEWAY_NEW_ITEM_SHARE": "0.3",
            "FRESHET_GATEWAY_IMPRESSION_DISCOUNT": "0.5",
            "FRESHET_GATEWAY_RULES": str(folder / "rules.yaml"),
        }
        self.stack = Stack(folder / "state", bundle=bundle, ports=Ports.free(), settings=settings)
        self.stack.up()
        ensure_topics(self.stack.kafka_bootstrap)
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(self.stack.address("gateway"), options=options)
        self.gateway = gateway_pb2_grpc.GatewayServiceStub(self.channel)
        self.keys = {role: [("authorization", f"Bearer {secret}")] for role, secret in secrets.items()}
        self.http = f"http://{self.stack.address('gateway-http')}"
        self.producer = BulkProducer(self.stack.kafka_bootstrap, client_id="attacks")
        self.run = uuid.uuid4().hex[:8]
        for number in range(20):
            self.record(
                *(self.event(f"regular-{number}", self.bundle.item_ids[(7 * number + n) % 300]) for n in range(8))
            )
        self.until("states", lambda: self.recommend("regular-19").state_source == "stored")

    def close(self) -> None:
        self.channel.close()
        self.producer.close(1.0)
        self.stack.down()

    @staticmethod
    def until(what: str, look: Callable[[], Any], within_s: float = 60.0) -> Any:
        deadline = time.monotonic() + within_s
        while not (found := look()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {within_s:g} s")
            time.sleep(0.05)
        return found

    @staticmethod
    def event(user: str, item: str, **fields: Any) -> events_pb2.Interaction:
        message = events_pb2.Interaction(user_id=user, item_id=item, **fields)
        message.event_time.FromMilliseconds(round(time.time() * 1000))
        return message

    def record(self, *interactions: events_pb2.Interaction) -> Any:
        request = gateway_pb2.RecordInteractionsRequest(interactions=interactions)
        return self.gateway.RecordInteractions(request, timeout=10, metadata=self.keys["ingest"])

    def recommend(self, user: str, k: int = 10, **fields: Any) -> Any:
        request = gateway_pb2.RecommendRequest(user_id=user, k=k, **fields)
        return self.gateway.Recommend(request, timeout=10, metadata=self.keys["recommend"])

    def send(self, method: str, data: bytes, role: str) -> str:
        """Raw bytes as one call; the status and what it says."""
        call = self.channel.unary_unary(GATEWAY + method, request_serializer=None, response_deserializer=None)
        try:
            call(data, timeout=60, metadata=self.keys[role])
        except grpc.RpcError as exc:
            return f"{exc.code().name}: {exc.details()[:90]}"
        return "OK"

    def post(self, method: str, body: bytes, role: str | None, **headers: str) -> str:
        """The same by JSON."""
        sent = {"content-type": "application/json", **headers}
        if role is not None:
            sent["authorization"] = self.keys[role][0][1]
        request = urllib.request.Request(self.http + GATEWAY + method, body, sent)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
                return str(answer.status)
        except urllib.error.HTTPError as exc:
            return f"{exc.code}: {exc.read(300).decode(errors='replace')[:90]}"
        except OSError as exc:
            return f"closed: {exc}"[:90]

    def process(self, part: str) -> psutil.Process:
        (status,) = [one for one in self.stack.status() if one.name == part]
        return psutil.Process(status.pid)

    def resident_mb(self, part: str = "gateway") -> float:
        return float(self.process(part).memory_info().rss) / 1e6

    def cpu_s(self, part: str = "gateway") -> float:
        times = self.process(part).cpu_times()
        return float(times.user + times.system)

    @contextlib.contextmanager
    def bystander(self) -> Iterator[dict[str, float]]:
        """Another caller on a connection of its own, 50 times a second: how much slower its slowest answer became."""
        found: dict[str, float] = {}
        times: list[float] = []
        failures: Counter[str] = Counter()
        stop = threading.Event()

        def ask() -> None:
            # A connection of its own: the attacker's large messages wait in front of nobody else's.
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
            with grpc.insecure_channel(self.stack.address("gateway"), options=options) as channel:
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                while not stop.is_set():
                    begun = time.perf_counter()
                    try:
                        request = gateway_pb2.RecommendRequest(user_id="regular-3", k=10)
                        stub.Recommend(request, timeout=60, metadata=self.keys["recommend"])
                    except grpc.RpcError as exc:
                        failures[exc.code().name] += 1
                    times.append(1000 * (time.perf_counter() - begun))
                    stop.wait(0.02)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        self.until("idle answers", lambda: len(times) >= 100)
        idle = sorted(times)
        before = len(times)
        found["idle_p99_ms"] = round(idle[int(0.99 * len(idle))], 1)
        try:
            yield found
        finally:
            self.until("answers after it", lambda: len(times) >= before + 5, within_s=120)
            stop.set()
            thread.join(60)
            found["slowest_ms"] = round(max(times[before:]), 1)
            found["median_ms"] = round(statistics.median(times[before:]), 1)
            found["failed_calls"] = float(sum(failures.values()))

    def is_disturbed(self, seen: dict[str, Any]) -> bool:
        return bool(seen["slowest_ms"] > seen["idle_p99_ms"] + DELAY_MS or seen["failed_calls"])


Seen = dict[str, Any]


def one_call(scene: Scene, call: Callable[[], str]) -> tuple[Seen, bool]:
    """What one call does to the bystander and to the gateway's memory."""
    before = scene.resident_mb()
    with scene.bystander() as seen:
        answer = call()
    with contextlib.suppress(TimeoutError):  # Then what is kept says so.
        scene.until("memory given back", lambda: scene.resident_mb() < before + KEPT_MB, within_s=5)
    found = {**seen, "answer": answer, "kept_mb": round(scene.resident_mb() - before, 1)}
    return found, scene.is_disturbed(seen) or found["kept_mb"] > KEPT_MB


def counts(scene: Scene) -> Iterator[tuple[str, Seen, bool]]:
    """A.1: as many empty submessages, or ids, as a message of the largest size has."""
    half = MESSAGE_BYTES // 2 - 1000
    for name, method, tag, role in (
        ("interactions", "RecordInteractions", b"\x0a\x00", "ingest"),
        ("items", "PutItems", b"\x0a\x00", "operator"),
        ("rules", "Recommend", b"\x6a\x00", "recommend"),
        ("history", "Recommend", b"\x2a\x00", "recommend"),
        ("impressions", "RecordImpressions", b"\x1a\x00", "ingest"),
    ):
        data = (b"" if method != "Recommend" else b"\x0a\x01u\x10\x03") + tag * half
        yield name, *one_call(scene, lambda method=method, data=data, role=role: scene.send(method, data, role))
    body = b'{"interactions":[' + b"{}," * 1_300_000 + b'{"x":1}]}'
    yield "JSON, wrong at the end", *one_call(scene, lambda: scene.post("RecordInteractions", body, "ingest"))
    ids = b'{"userId":"u","k":3,"filter":{"denyItemIds":[' + b",".join([b'"1"'] * 900_000) + b"]}}"
    yield "JSON, 900,000 ids", *one_call(scene, lambda: scene.post("Recommend", ids, "recommend"))


def http_port(scene: Scene) -> Iterator[tuple[str, Seen, bool]]:
    """A.2: the JSON port, by somebody without a key."""
    host, port = scene.stack.address("gateway-http").split(":")
    path = f"{GATEWAY}Recommend".encode()

    def unfinished_header() -> str:
        with socket.create_connection((host, int(port)), timeout=30) as link:
            link.sendall(b"POST " + path + b" HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
            for sent in range(150):
                try:
                    link.sendall(b"a" * 1_000_000)
                except OSError as exc:
                    return f"closed after {sent} MB: {exc.strerror}"
        return "150 MB taken"

    yield "a header without an end", *one_call(scene, unfinished_header)

    def bodies() -> str:
        body = b'{"userId":"' + b"a" * (MESSAGE_BYTES - 20) + b'"}'
        answers = Counter(scene.post("Recommend", body, None)[:20] for _ in range(100))
        return str(dict(answers))

    yield "100 bodies of 4 MB without a key", *one_call(scene, bodies)

    def silent() -> str:
        links = []
        try:
            for number in range(1_100):
                link = socket.create_connection((host, int(port)), timeout=10)
                if number % 2:
                    link.sendall(b"POST " + path + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n")
                links.append(link)
            body = b'{"userId":"regular-3","k":3}'
            return scene.post("Recommend", body, "recommend")
        finally:
            for link in links:
                link.close()

    seen, broken = one_call(scene, silent)
    yield "1,100 silent connections", seen, broken or not seen["answer"].startswith("200")

    def raw(lines: bytes) -> str:
        with socket.create_connection((host, int(port)), timeout=10) as link:
            link.sendall(lines)
            return link.recv(200).split(b"\r\n")[0].decode(errors="replace")

    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: "
    key = base64.b64encode(b"0" * 16)
    for name, lines in (
        ("websocket upgrade", b"GET " + path + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n" + upgrade + key + b"\r\n\r\n"),
        ("Host: [::1", b"POST " + path + b" HTTP/1.1\r\nhost: [::1\r\ncontent-length: 0\r\n\r\n"),
    ):
        answer = raw(lines)
        yield name, {"answer": answer}, " 500 " in answer


def page_lists(scene: Scene) -> Iterator[tuple[str, Seen, bool]]:
    """A.3: lists kept for invented users."""
    with redis.Redis.from_url(scene.stack.redis_url) as store:
        before, calls = store.info("memory")["used_memory"], 2_000
        for number in range(calls):
            scene.recommend(f"invented-{scene.run}-{number}", page_depth=min(1000, len(scene.bundle.item_ids)))
        grown = store.info("memory")["used_memory"] - before
    yield f"{calls} lists of unknown users", {"bytes_per_call": round(grown / calls)}, grown / calls > 500


def noisy_neighbour(scene: Scene) -> Iterator[tuple[str, Seen, bool]]:
    """A.4: 200,000 events of one user, and a token of another partition's user meanwhile."""

    def place(user: str) -> int:
        return partition_for(user.encode(), NUM_PARTITIONS)

    noisy = f"noisy-{scene.run}"
    quiet = next(user for n in range(1000) if place(user := f"quiet-{n}") != place(noisy))
    items = scene.bundle.item_ids
    for start in range(0, 200_000, 10_000):
        batch = [
            scene.event(noisy, items[n % len(items)], event_id=f"{noisy}-{n}") for n in range(start, start + 10_000)
        ]
        scene.producer.send_many([Record(INTERACTIONS, noisy.encode(), one.SerializeToString()) for one in batch])
    begun, waits = time.monotonic(), []
    while time.monotonic() < begun + 60:
        token = scene.record(scene.event(quiet, items[len(waits) % len(items)])).receipts[0].token
        since = time.monotonic()
        scene.until("the token", lambda token=token: scene.recommend(quiet, freshness_token=token).token_honoured, 120)
        waits.append(time.monotonic() - since)
    yield (
        f"tokens of another partition ({NUM_PARTITIONS} partitions)",
        {"slowest_s": round(max(waits), 2)},
        max(waits) > 2,
    )


def new_items(scene: Scene) -> Iterator[tuple[str, Seen, bool]]:
    """A.5: many new items of one category."""
    before, count = scene.cpu_s(), 80_000
    for start in range(0, count, 10_000):
        items = [
            events_pb2.Item(item_id=f"mass-{n}", title=f"Mass {n}", categories=["Mass"])
            for n in range(start, start + 10_000)
        ]
        scene.producer.send_many([Record(ITEMS, one.item_id.encode(), one.SerializeToString()) for one in items])
    wanted = common_pb2.Filter(allow_item_ids=[f"mass-{count - 1}"])
    scene.until("the last one", lambda: scene.recommend(f"who-{uuid.uuid4().hex}", k=1, filter=wanted).items, 300)
    used = scene.cpu_s() - before
    yield f"{count} items of one category", {"gateway_cpu_s": round(used, 1)}, used > 16


def rules_hold(scene: Scene) -> Iterator[tuple[str, Seen, bool]]:
    """B.3: category limits are met and the answers whole; pins and caps hold beside reserved positions."""
    fresh = [f"fresh-{scene.run}-{n}" for n in range(40)]
    some = sorted({of[0] for of in scene.categories.values() if of})
    items = [
        events_pb2.Item(item_id=one, title=one, categories=[scene.capped if n % 2 else some[0]])
        for n, one in enumerate(fresh)
    ]
    request = gateway_pb2.PutItemsRequest(items=items)
    scene.gateway.PutItems(request, timeout=10, metadata=scene.keys["operator"])
    wanted = common_pb2.Filter(allow_item_ids=fresh)
    scene.until("new items", lambda: len(scene.recommend(f"new-{uuid.uuid4().hex}", 5, filter=wanted).items) == 5)
    known = {**scene.categories, **{one.item_id: tuple(one.categories) for one in items}}
    held: Counter[str] = Counter()
    whole = 0
    for of in scene.categories.values():
        if whole < 20 and all(held[category] < LIMIT for category in of):
            whole += 1
            held.update(of)
    wrong: Counter[str] = Counter()
    for number in range(240):
        answer = scene.recommend(f"regular-{number % 20}", k=20, max_per_category=LIMIT)
        ids = [one.item_id for one in answer.items]
        held = Counter(category for one in ids for category in known.get(one, ()))
        wrong["short and unmarked"] += len(ids) < whole and not answer.degradations
        wrong["category limit broken"] += max(held.values(), default=0) > LIMIT
        wrong["cap broken"] += held[scene.capped] > 1
        wrong["pin broken"] += scene.pinned in ids and ids[0] != scene.pinned
        wrong["item twice"] += len(set(ids)) < len(ids)
    yield f"240 answers of 20, at most {LIMIT} of a category", dict(wrong), any(wrong.values())


def impressions(scene: Scene) -> Iterator[tuple[str, Seen, bool]]:
    """B.4: what impressions and one person's clicks do to answers."""
    user = "regular-5"
    most = min(1_000, len(scene.bundle.item_ids))
    for _ in range(10):
        shown = scene.recommend(user, k=most, filter=common_pb2.Filter(exclude_seen=False))
        seen = [gateway_pb2.Impression(position=n, item_id=one.item_id) for n, one in enumerate(shown.items[:1000], 1)]
        request = gateway_pb2.RecordImpressionsRequest(user_id=user, exposure_id=shown.exposure_id, impressions=seen)
        scene.gateway.RecordImpressions(request, timeout=20, metadata=scene.keys["ingest"])
    answer = scene.recommend(user)
    marks = [gateway_pb2.Degradation.Name(one)[12:] for one in answer.degradations]
    sources = dict(Counter(one.source for one in answer.items))
    yield "10 calls of 1,000 impressions", {"sources": sources, "marks": marks}, "popular" in sources

    scores = {}
    for way, user in (("record", "regular-6"), ("stream", "regular-7")):
        first = scene.recommend(user, filter=common_pb2.Filter(exclude_seen=False))
        item = next(one for one in first.items if one.source == "mol")
        told = scene.event(user, item.item_id, type="impression", exposure_id=first.exposure_id)
        if way == "record":
            scene.record(told)
        else:
            requests = iter([gateway_pb2.StreamInteractionsRequest(interaction=told)])
            scene.gateway.StreamInteractions(requests, timeout=10, metadata=scene.keys["ingest"])
        after = {
            one.item_id: one.score
            for one in scene.recommend(user, 100, filter=common_pb2.Filter(exclude_seen=False)).items
        }
        scores[way] = round(item.score - after.get(item.item_id, -1.0), 3)
    yield "an impression takes from the score", scores, min(scores.values()) < 0.3

    taken = scene.bundle.item_ids[-1]
    clicks = [scene.event("clicker", taken, type="click", event_id=f"click-{scene.run}-{n}") for n in range(300)]
    token = scene.record(*clicks).receipts[-1].token
    scene.until("clicks applied", lambda: scene.recommend("clicker", freshness_token=token).token_honoured)
    deadline = time.monotonic() + 12  # Popular items are read every 5 s.
    best: list[str] = []
    while time.monotonic() < deadline and taken not in best[:1]:
        best = [one.item_id for one in scene.recommend(f"stranger-{uuid.uuid4().hex}").items if one.source == "popular"]
        time.sleep(0.5)
    yield "300 clicks of one user", {"leads everybody's list": taken in best[:1]}, taken in best[:1]


def huge_delta(scene: Scene) -> Iterator[tuple[str, Seen, bool]]:
    """B.1: one record of `index-deltas` whose components are not of unit length."""
    head, item = scene.bundle.manifest.head, scene.bundle.item_ids[2]
    before = [[one.item_id for one in scene.recommend(f"regular-{n}", 20).items] for n in range(10, 15)]
    message = events_pb2.IndexDelta(model_version=scene.bundle.model_version, batch=1, last_of_batch=True)
    message.reflects.partition, message.reflects.offset = 0, 1 << 40
    state = message.item
    state.item_id, state.num_components, state.component_width = item, head.num_item_components, head.component_width
    state.components = np.full(head.num_item_components * head.component_width, 3e38, "<f4").tobytes()
    state.gate = np.zeros(head.num_pairs, "<f4").tobytes()
    key = item_key(scene.bundle.model_version, item)
    ((_, offset),) = scene.producer.send_many([Record(INDEX_DELTAS, key, message.SerializeToString())])
    with contextlib.suppress(TimeoutError):  # A record that is refused may leave the position behind it.
        reached = lambda: scene.recommend("regular-10").index_freshness.deltas_offset >= offset  # noqa: E731
        scene.until("the record", reached, within_s=20)
    answers = [scene.recommend(f"regular-{n}", 20) for n in range(10, 15)]
    largest = max(one.score for answer in answers for one in answer.items)
    same = sum(len(set(old) & {one.item_id for one in new.items}) for old, new in zip(before, answers, strict=True))
    yield (
        "components of 3e38",
        {"largest_score": largest, "items_as_before": f"{same} of 100"},
        largest > 2 or same < 80,
    )


def items_topic_made_anew(scene: Scene) -> Iterator[tuple[str, Seen, bool]]:
    """B.2: the topic `items` is deleted and created while the stack runs."""
    with grpc.insecure_channel(scene.stack.address("candidates")) as channel:
        stub = candidates_pb2_grpc.CandidatesServiceStub(channel)

        def info() -> Any:
            return stub.GetIndexInfo(candidates_pb2.GetIndexInfoRequest(), timeout=10)

        taken = [f"taken-{n}" for n in range(30)]
        request = gateway_pb2.PutItemsRequest(items=[events_pb2.Item(item_id=one, title=one) for one in taken])
        scene.gateway.PutItems(request, timeout=10, metadata=scene.keys["operator"])
        at_start = info().num_items
        scene.record(*(scene.event(f"regular-{n % 20}", one) for n in range(12) for one in taken))
        scene.until("states of new items", lambda: info().num_items >= at_start + 10, 60)
        time.sleep(3)
        before = info()
        admin = KafkaAdminClient(bootstrap_servers=scene.stack.kafka_bootstrap)
        admin.delete_topics([ITEMS])
        scene.until("deleted", lambda: ITEMS not in admin.list_topics())
        ensure_topics(scene.stack.kafka_bootstrap)
        admin.close()
        # A reader notices at the next record that its position is none of this topic's.
        request = gateway_pb2.PutItemsRequest(items=[events_pb2.Item(item_id="later", title="later")])
        scene.gateway.PutItems(request, timeout=30, metadata=scene.keys["operator"])
        infos = []
        begun = time.monotonic()
        while time.monotonic() < begun + 25:  # It is noticed at a poll, and nothing tells which one.
            infos.append(info())
            time.sleep(0.5)
    fewest = min(one.num_items for one in infos)
    yield "topic items made anew", {"items": f"{before.num_items} -> {fewest}"}, fewest < before.num_items


LIST = {
    one.__name__: one for one in (counts, http_port, page_lists, rules_hold, impressions, noisy_neighbour, new_items)
}
# Each of these changes what the next one would look at: a stack of its own.
ALONE = {one.__name__: one for one in (huge_delta, items_topic_made_anew)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[*LIST, *ALONE], choices=[*LIST, *ALONE])
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    groups = [
        [LIST[name] for name in LIST if name in asked.only],
        *([ALONE[name]] for name in ALONE if name in asked.only),
    ]
    for group in filter(None, groups):
        with tempfile.TemporaryDirectory(prefix="freshet-attacks-") as folder:
            scene = Scene(asked.bundle, Path(folder))
            try:
                for attack in group:
                    try:
                        found = list(attack(scene))
                    except Exception as exc:
                        found = [("failed", {"error": repr(exc)[:300]}, True)]
                    for name, seen, broken in found:
                        rows.append({"attack": attack.__name__, "case": name, **seen, "got_through": bool(broken)})
                        sys.stderr.write(f"{'BROKEN' if broken else 'ok':7}{attack.__name__}: {name}: {seen}\n")
            finally:
                scene.close()
    sys.stdout.write(json.dumps(rows) + "\n")
    return int(any(row["got_through"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
