"""The checks of `freshet doctor` on running parts: models, lag, Kafka's topics and Redis' memory.

A part counts as running if it answers at the stack's address: containers publish the same ports.
"""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from services.cli import client
from services.cli.doctor import Finding, error, fine, warning
from services.cli.output import CommandError, duration
from services.contracts.processes import EFFECTS, PROCESSES
from services.platform.stream.follower import STUCK_S
from services.stack.folders import DEFAULT_STATE
from services.stack.launcher import PartStatus, Stack

# The RPC that returns the version of a process's model.
_TELLS = {
    "refresher": "GetStatus",
    "candidates": "GetIndexInfo",
    "reranker": "GetRerankerInfo",
    "gateway": "GetFreshness",
}
_MANY_RECORDS = 1000
_NEARLY_FULL = 0.85


@dataclass(frozen=True)
class Running:
    """The parts of a stack. `answers` maps each running part to its problem, or to None if the part is ready."""

    stack: Stack
    statuses: Mapping[str, PartStatus]
    answers: Mapping[str, str | None]

    @classmethod
    def of(cls, stack: Stack) -> "Running":
        """Probe every part once."""
        statuses = {status.name: status for status in stack.status()}
        answers = {name: status.problem for name, status in statuses.items() if status.running}
        for name in statuses.keys() - answers.keys():
            if any(stack.ports.taken(name)):
                problem = stack.components[name].probe(stack.place)
                # NOT_SERVING comes from a process of Freshet; other problems may come from a foreign process.
                if problem is None or "NOT_SERVING" in problem:
                    answers[name] = problem
        return cls(stack, statuses, answers)

    @property
    def absent(self) -> list[str]:
        return [name for name in self.statuses if name not in self.answers]

    def is_ready(self, name: str) -> bool:
        """Return whether the part runs and is ready."""
        return self.answers.get(name, "absent") is None

    def command(self, verb: str, *options: str) -> str:
        """Return `freshet VERB` with this stack's state folder, unless it is the default."""
        root = self.stack.place.state.root
        where = () if root == DEFAULT_STATE.resolve() else ("--state", shlex.quote(str(root)))
        return " ".join(("freshet", verb, *where, *options))

    @property
    def restart_command(self) -> str:
        """Return the command that stops this stack and starts it again."""
        return f"{self.command('down')} && {self.command('up')}"

    def log_command(self, name: str) -> str:
        """Return the command that shows the end of a part's log."""
        ours = self.statuses[name].running
        return f"tail -n 20 {self.stack.log(name)}" if ours else f"docker compose logs --tail 20 {name}"


def look_at_parts(running: Running) -> Iterator[Finding]:
    """Yield a finding for each part, which is ready, not ready, or not running."""
    if not running.answers:
        yield fine("stack", "not running")
        return
    logged = {name for name in running.statuses if running.stack.log(name).exists()}
    for name, status in running.statuses.items():
        if name not in running.answers and logged and name not in logged:
            yield fine(name, "never started in this state folder")
        elif name not in running.answers:
            yield error(name, "not running", EFFECTS[name], running.command("up", f"--only {name}"))
        elif (problem := running.answers[name]) is not None:
            yield error(name, problem, EFFECTS[name], running.log_command(name))
        else:
            where = "" if status.running else ", not started from this state folder"
            yield fine(name, f"ready at {status.address}{where}")


def look_at_running(running: Running) -> Iterator[Finding]:
    """Check the parts that answer."""
    yield from _versions(running)
    if running.is_ready("kafka") and running.answers.keys() & PROCESSES.keys():
        yield from _topics(running)
    if running.is_ready("redis"):
        yield from _store(running)
    for name in PROCESSES:
        if name in running.answers:
            yield from _loops(running, name)


def _versions(running: Running) -> Iterator[Finding]:
    versions = {name: version for name in _TELLS if running.is_ready(name) if (version := _version(running, name))}
    if running.is_ready("inference-server"):
        versions["inference-server"] = _served_version(running.stack.address("inference-server"))
    if not versions:
        return
    found = ", ".join(f"{name}: {version}" for name, version in versions.items())
    if len(set(versions.values())) > 1:
        why = "a process rejects the states of another model, so users get popular items"
        yield error("model", found, why, running.restart_command)
        return
    (version,) = set(versions.values())
    noted = _bundle_version(running.stack)
    if noted not in (None, version):
        why = "the newer model is not served"
        yield warning("model", f"{version} runs, {noted} is in the bundle", why, running.restart_command)
        return
    yield fine("model", f"{version} in {', '.join(versions)}")


def _version(running: Running, name: str) -> str | None:
    """Return the model's version, or None if the call fails, for example without permission."""
    target, rpc = running.stack.address(name), _TELLS[name]
    request = getattr(import_module(f"freshet.v1.{name}_pb2"), f"{rpc}Request")()
    with client.process(name, target) as stub, suppress(CommandError):
        answer = client.call(getattr(stub, rpc), request, target=target, timeout_s=2, process=name)
        return str(answer.model_version)
    return None


def _served_version(address: str) -> str:
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            config = stub.ModelConfig(service_pb2.ModelConfigRequest(name="encoder"), timeout=2).config
        except grpc.RpcError as exc:
            raise OSError(f"the inference server does not describe its model ({exc.code().name})") from exc
    return str(config.parameters["model_version"].string_value)


def _bundle_version(stack: Stack) -> str | None:
    from services.algorithms.bundles.model_bundle import BundleError, load_bundle

    with suppress(BundleError, OSError):
        return load_bundle(stack.bundle).model_version
    return None


def _topics(running: Running) -> Iterator[Finding]:
    from kafka.admin import KafkaAdminClient
    from kafka.errors import KafkaError

    from services.contracts.topics import TOPICS
    from services.platform.config import environment_kafka
    from services.platform.stream.kafka import kafka_options

    brokers = environment_kafka(running.stack.kafka_bootstrap)
    try:
        admin = KafkaAdminClient(**kafka_options(brokers), request_timeout_ms=5_000, api_version_auto_timeout_ms=2_000)
        try:
            missing = sorted({topic.name for topic in TOPICS} - set(admin.list_topics()))
        finally:
            admin.close()
    except KafkaError as exc:
        raise OSError(f"Kafka does not list its topics: {exc}") from exc
    if missing:
        why = "writes to them wait; processes create missing topics when they start"
        yield error("topics", f"missing: {', '.join(missing)}", why, running.restart_command)
    else:
        yield fine("topics", f"all {len(TOPICS)} are there")


def _store(running: Running) -> Iterator[Finding]:
    import redis

    cli = f"redis-cli -p {running.stack.ports['redis']}"
    try:
        with redis.Redis.from_url(running.stack.redis_url, socket_timeout=2) as connection:
            info: Any = connection.info("memory")
    except redis.RedisError as exc:
        raise OSError(f"Redis does not tell its memory: {exc}") from exc
    policy, limit = info["maxmemory_policy"], info["maxmemory"]
    if policy != "noeviction":
        why = "when Redis is full, it evicts histories"
        advice = f"{cli} config set maxmemory-policy noeviction"
        yield error("Redis", f"maxmemory-policy is {policy}", why, advice)
    share = info["used_memory"] / limit if limit else 0.0
    if share > _NEARLY_FULL:
        why = "when Redis is full, it refuses writes and the stream waits"
        advice = f"{cli} config set maxmemory {2 * limit}, and FRESHET_REDIS_MAXMEMORY for its next start"
        yield error("Redis", f"uses {share:.0%} of its memory limit", why, advice)
    elif policy == "noeviction":
        yield fine("Redis", f"uses {share:.0%} of its memory limit, evicts nothing" if limit else "has no memory limit")


def _loops(running: Running, name: str) -> Iterator[Finding]:
    from services.stack.lag import read_samples

    address, log = running.stack.address(f"{name}-metrics"), running.log_command(name)
    try:
        samples = read_samples(address)
    except OSError as exc:
        yield warning(f"metrics of {name}", f"no answer at {address} ({exc})", "alerts get no data from it", log)
        return

    def figure(suffix: str) -> float:
        return max((one.value for one in samples if one.name == f"freshet_{name}_{suffix}"), default=0.0)

    unnamed = {one.labels["type"]: one.value for one in samples if one.name == "freshet_encoder_unknown_types_total"}
    if unnamed:
        names = ", ".join(f"{kind} ({count:,.0f})" for kind, count in sorted(unnamed.items()))
        why = "unknown types are neutral: histories do not keep them, and nothing is learnt from them"
        yield warning("types of events", f"not in the event schema: {names}", why, "freshet train --events events.yaml")

    failures, age_s = figure("turn_failures"), figure("turn_age_seconds")
    if failures or age_s > STUCK_S:
        how = f"failed {failures:.0f} times in a row" if failures else "hangs"
        found = f"the loop {how}, and last worked {duration(age_s)} ago"
        yield error(f"stream of {name}", found, "what is written does not reach answers", log)
    if figure("index_full") or figure("merge_failed"):
        found = "it has no room for changes" if figure("index_full") else "changes cannot be merged"
        yield error(f"index of {name}", found, "it serves what it has, or gets slower", log)
    waiting = sum(one.value for one in samples if one.name == f"freshet_{name}_lag_records")
    if waiting >= _MANY_RECORDS:
        why = "answers do not reflect them, and say NOT_FRESH"
        yield warning(f"stream of {name}", f"{waiting:,.0f} records wait", why, "freshet watch")
    elif not failures and age_s <= STUCK_S:
        yield fine(f"stream of {name}", f"{waiting:,.0f} records wait")
