"""docker-compose.yml, its overlays and the local launcher say the same thing: ports, settings, order, versions."""

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from services.cli.doctor.examine import settings_of, variables_of
from services.contracts.processes import BUNDLE, CHECKPOINTS, KEYS, PROCESSES, SECRETS, TEXT, Process
from services.contracts.pseudonyms import pseudonym_key
from services.encoder.config import EncoderSettings
from services.gateway.config import GatewaySettings
from services.gateway.edge import first_keys
from services.gateway.edge.api_keys import read_keys
from services.generator.config import GeneratorSettings
from services.platform.config import load_settings
from services.stack.components.kafka import JARS as KAFKA_JARS
from services.stack.components.kafka import server_properties
from services.stack.compose import COMPOSE_FILE, local_environment, localize, read_compose
from services.stack.folders import REPOSITORY
from services.stack.ports import DEFAULTS, PARTS, Ports, owner

DEPLOY = REPOSITORY / "deploy"
OVERLAYS = (DEPLOY / "compose.gpu.yml", DEPLOY / "compose.observability.yml")
# Read by libraries, not by our settings.
LIBRARY_VARIABLES = {
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
    "ORT_DISABLE_TELEMETRY",
}
SERVICES = read_compose(environ={})
RAW = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))
# What runs once, in containers alone.
ONCE = {"keys"}


SETTINGS = {name: settings_of(row) for name, row in PROCESSES.items()}


def test_the_file_holds_the_parts_of_the_local_stack_and_no_others() -> None:
    assert set(SERVICES) == set(PARTS)
    assert set(RAW["services"]) == set(PARTS) | ONCE


def test_keys_are_made_before_whoever_reads_them_starts(tmp_path: Path) -> None:
    keys, secrets = tmp_path / "keys", tmp_path / "secrets"
    secrets.mkdir()
    entry = RAW["services"]["keys"]
    assert entry["command"] == ["python", "-m", first_keys.__name__, KEYS, SECRETS]
    assert entry["volumes"] == [f"keys:{KEYS}", f"secrets:{SECRETS}"]
    assert (entry["restart"], "ports" in entry) == ("no", False)
    first_keys.make_first_keys(keys, secrets)
    made = {f"{KEYS}/{path.name}" for path in keys.iterdir()} | {f"{SECRETS}/{path.name}" for path in secrets.iterdir()}
    asked = {value for service in SERVICES.values() for value in service.environment.values() if value.startswith(KEYS)}
    asked |= {
        value for service in SERVICES.values() for value in service.environment.values() if value.startswith(SECRETS)
    }
    assert asked == made - {f"{SECRETS}/api-key"}
    for row in PROCESSES.values():
        waits = RAW["services"][row.name].get("depends_on", {}).get("keys")
        needs_them = {KEYS, SECRETS} & set(row.state)
        assert waits == ({"condition": "service_completed_successfully"} if needs_them else None)
    # The gateway, which strangers reach, is given no API key.
    assert SECRETS not in PROCESSES["gateway"].state
    folders = (REPOSITORY / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert f"-o freshet -g freshet -m 700 {KEYS} {SECRETS}\n" in folders


def test_containers_have_the_keys_that_they_do_not_start_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first_keys.make_first_keys(tmp_path, tmp_path)
    for process in ("gateway", "encoder"):
        with monkeypatch.context() as patch:
            for name, value in SERVICES[process].environment.items():
                patch.setenv(name, value.replace(KEYS, str(tmp_path)).replace(SECRETS, str(tmp_path)))
            loaded = load_settings(SETTINGS[process])
        assert not loaded.is_on_loopback
        if isinstance(loaded, EncoderSettings):
            assert pseudonym_key(loaded) == (tmp_path / "pseudonym-key").read_bytes()
        if isinstance(loaded, GatewaySettings):
            assert loaded.api_keys is not None
            assert [key.id for key in read_keys(loaded.api_keys)] == ["first"]


def test_the_local_stack_has_no_keys_and_stays_on_loopback() -> None:
    for service in SERVICES.values():
        local = local_environment(service, Ports.default(), Path("/the/bundle"), Path("/the/text"))
        assert not {"FRESHET_API_KEYS", "FRESHET_PSEUDONYM_KEY_FILE"} & local.keys()
        assert local.get("FRESHET_HOST", "127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("name", sorted(PARTS))
def test_published_ports_are_the_documented_ones(name: str) -> None:
    documented = {port for label, port in DEFAULTS.items() if owner(label) == name and label != "kafka-controller"}
    assert set(SERVICES[name].published) == documented
    for port in RAW["services"][name]["ports"]:
        host, outside, inside = str(port).split(":")
        assert (host, outside) == ("127.0.0.1", inside), "loopback only, same number"


@pytest.mark.parametrize("process", PROCESSES)
def test_every_setting_is_known_to_its_process(process: str) -> None:
    unknown = set(SERVICES[process].environment) - variables_of(SETTINGS[process]) - LIBRARY_VARIABLES
    assert unknown == set()


@pytest.mark.parametrize("process", PROCESSES)
def test_container_and_local_process_load_the_same_settings(process: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SERVICES[process]
    loaded = []
    own = local_environment(service, Ports.default(), Path("/the/bundle"), Path("/the/text"))
    for environment in (service.environment, own):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            loaded.append(load_settings(SETTINGS[process]))
    container, local = loaded
    differ = {name for name, value in container.model_dump().items() if local.model_dump()[name] != value}
    # Without the containers' keys, which the local stack does not need.
    places = {
        "api_keys",
        "pseudonym_key_file",
        "signing_key_file",
        "host",
        "bundle",
        "text",
        "redis_url",
        "kafka_bootstrap",
        "inference_server",
        "metrics_port",
        "http_port",
    }
    assert differ <= places | {f"{peer}_address" for peer in PROCESSES} | {"refresher_addresses"}
    assert local.port == container.port == DEFAULTS[process]
    assert local.resolved_metrics_port == container.resolved_metrics_port == DEFAULTS[f"{process}-metrics"]
    if process == "gateway":
        assert local.resolved_http_port == container.resolved_http_port == DEFAULTS["gateway-http"]
    assert local.redis_url == "redis://127.0.0.1:16379/0"
    assert local.kafka_bootstrap == "127.0.0.1:19092"
    assert local.inference_server == "127.0.0.1:18001"
    assert local.bundle == Path("/the/bundle")
    if isinstance(local, GeneratorSettings):
        assert local.text == Path("/the/text")


def test_documented_defaults_are_the_settings_own_defaults() -> None:
    for process, settings in SETTINGS.items():
        fields = settings.model_fields
        assert fields["port"].default == DEFAULTS[process]
        assert fields["redis_url"].default == f"redis://127.0.0.1:{DEFAULTS['redis']}/0"
        assert fields["kafka_bootstrap"].default == f"127.0.0.1:{DEFAULTS['kafka']}"
        assert fields["inference_server"].default == f"127.0.0.1:{DEFAULTS['inference-server']}"


@pytest.mark.parametrize("process", PROCESSES)
def test_command_is_the_process_and_its_health_check_asks_its_own_port(process: str) -> None:
    program, flag, module = SERVICES[process].command
    assert (program, flag, module) == ("python", "-m", PROCESSES[process].module)
    assert importlib.util.find_spec(f"{module}.__main__") is not None
    *_, probe, address = RAW["services"][process]["healthcheck"]["test"]
    assert importlib.util.find_spec(probe) is not None
    assert address == f"127.0.0.1:{DEFAULTS[process]}"


def test_every_service_has_a_health_check_and_comes_back() -> None:
    for name in SERVICES:
        entry = RAW["services"][name]
        assert entry["healthcheck"]["test"][0] == "CMD", name
        assert entry["restart"] == "unless-stopped", name


def test_order_names_known_services_and_has_no_circle() -> None:
    started: set[str] = set()
    waiting = dict(SERVICES)
    while waiting:
        ready = {name for name, service in waiting.items() if set(service.needs) <= started}
        assert ready, f"these wait for each other: {sorted(waiting)}"
        started |= ready
        for name in ready:
            del waiting[name]


def test_processes_name_each_other_by_service() -> None:
    gateway = SERVICES["gateway"].environment
    for peer in ("encoder", "candidates", "reranker", "generator"):
        assert gateway[f"FRESHET_{peer.upper()}_ADDRESS"] == f"{peer}:{DEFAULTS[peer]}"
    assert gateway["FRESHET_REFRESHER_ADDRESSES"] == f"refresher:{DEFAULTS['refresher']}"


def test_both_stacks_run_the_same_kafka() -> None:
    version = re.search(r"^org.apache.kafka:kafka_2.13:(\S+) ", KAFKA_JARS.read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert SERVICES["kafka"].image == f"apache/kafka:{version[1]}"
    assert version[1].startswith("4.")


def test_local_broker_takes_the_containers_properties_and_its_own_addresses() -> None:
    properties = server_properties(SERVICES["kafka"].environment, Ports.default(offset=7), Path("/data"))
    assert properties["listeners"] == "CLIENT://127.0.0.1:19099,CONTROLLER://127.0.0.1:19100"
    assert properties["log.dirs"] == "/data"
    assert properties["auto.create.topics.enable"] == "false"
    assert properties["num.network.threads"] == "2"
    assert not any(name.startswith(("heap", "jvm")) for name in properties)
    assert not any("kafka:" in value for value in properties.values())


def test_kafkas_heap_is_bounded() -> None:
    heap = re.search(r"-Xmx(\d+)m", SERVICES["kafka"].environment["KAFKA_HEAP_OPTS"])
    assert heap is not None
    assert int(heap[1]) <= 512


def test_hosts_become_loopback_and_nothing_else_changes() -> None:
    ports = Ports.default(offset=1)
    for value, found in {
        "redis://redis:16379/0": "redis://127.0.0.1:16380/0",
        "kafka:19094,kafka:19094": "127.0.0.1:19093,127.0.0.1:19093",
        "/bundle/x": "/b/x",
        "/text": "/t",
        "0.0.0.0": "127.0.0.1",
        "http://my-kafka:1/bundle": "http://my-kafka:1/bundle",
    }.items():
        assert localize(value, ports, Path("/b"), Path("/t")) == found


def test_variables_come_from_the_environment_or_their_default() -> None:
    assert SERVICES["gateway"].environment["FRESHET_LOG_LEVEL"] == "info"
    louder = read_compose(environ={"FRESHET_LOG_LEVEL": "debug"})
    assert louder["gateway"].environment["FRESHET_LOG_LEVEL"] == "debug"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlays_mount_files_that_exist_and_change_known_services(overlay: Path) -> None:
    raw: dict[str, Any] = yaml.safe_load(overlay.read_text(encoding="utf-8"))
    volumes = set(raw.get("volumes", {})) | set(RAW["volumes"])
    for name, entry in raw["services"].items():
        assert name in SERVICES or "image" in entry, name
        for mount in entry.get("volumes", []):
            if mount.startswith(("${", "/")):  # a folder of the user's own
                continue
            source = mount.split(":")[0]
            assert (REPOSITORY / source).exists() if source.startswith(".") else source in volumes, mount


@pytest.mark.parametrize("overlay", OVERLAYS[:1], ids=lambda path: path.stem)
def test_overlays_keep_the_inference_servers_ports_and_its_encoder(overlay: Path) -> None:
    command = read_compose(overlay, environ={})["inference-server"].command
    kept = [flag for flag in SERVICES["inference-server"].command if "-port=" in flag or "repository" in flag]
    assert [flag for flag in command if flag in kept] == kept


def test_whoever_the_gpu_overlay_gives_a_card_uses_it() -> None:
    raw = yaml.safe_load(OVERLAYS[0].read_text(encoding="utf-8"))["services"]
    assert {name for name, entry in raw.items() if "deploy" in entry} == {"inference-server"}
    assert "--model-config-name=onnxruntime-gpu" in raw["inference-server"]["command"]
    config = DEPLOY / "inference_server" / "encoder" / "configs" / "onnxruntime-gpu.pbtxt"
    parsed = text_format.Parse(config.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    assert [group.kind for group in parsed.instance_group] == [model_config_pb2.ModelInstanceGroup.KIND_GPU]
    # Nobody would ask it otherwise.
    assert raw["encoder"]["environment"] == {"FRESHET_ENCODER_ENGINE": "inference-server"}


def test_a_missing_bundle_ends_the_start_and_makes_no_folder() -> None:
    bundle = RAW["x-bundle"]
    assert (bundle["target"], bundle["read_only"], bundle["bind"]) == (BUNDLE, True, {"create_host_path": False})
    assert RAW["services"]["inference-server"]["volumes"] == [bundle]


def test_every_model_configuration_that_a_command_names_is_in_the_model_folder() -> None:
    commands = [SERVICES["inference-server"].command]
    commands += [read_compose(overlay, environ={})["inference-server"].command for overlay in OVERLAYS[:1]]
    for command in commands:
        (named,) = [flag.partition("=")[2] for flag in command if flag.startswith("--model-config-name")]
        config = DEPLOY / "inference_server" / "encoder" / "configs" / f"{named}.pbtxt"
        parsed = text_format.Parse(config.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
        assert (parsed.name, parsed.backend) == ("encoder", "onnxruntime")
        assert parsed.HasField("dynamic_batching")


def test_local_model_configuration_has_the_encoders_inputs_and_outputs() -> None:
    config = DEPLOY / "inference_server" / "encoder" / "config.pbtxt"
    parsed = text_format.Parse(config.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    assert (parsed.name, parsed.backend) == ("encoder", "python")
    assert {tensor.name for tensor in parsed.input} == {
        "item_index",
        "event_time",
        "position",
        "user_index",
        "cache_key",
    }
    assert [tensor.name for tensor in parsed.input if tensor.optional] == ["user_index", "cache_key"]
    assert {tensor.name for tensor in parsed.output} == {"components", "gate", "kept"}
    assert parsed.HasField("dynamic_batching")


def test_prometheus_scrapes_every_metrics_port() -> None:
    raw = yaml.safe_load((DEPLOY / "dashboards" / "prometheus.yml").read_text(encoding="utf-8"))
    targets = {
        target for job in raw["scrape_configs"] for config in job["static_configs"] for target in config["targets"]
    }
    exporters = {target for target in targets if target.partition(":")[0].endswith("-exporter")}
    assert targets - exporters == {
        f"{owner(name)}:{port}" for name, port in DEFAULTS.items() if name.endswith("-metrics")
    }
    overlay = yaml.safe_load(OVERLAYS[1].read_text(encoding="utf-8"))["services"]
    assert {target.partition(":")[0] for target in exporters} == {
        name for name in overlay if name.endswith("-exporter")
    }


def test_observability_has_pinned_images_no_administrator_and_traces_of_every_process() -> None:
    services = yaml.safe_load(OVERLAYS[1].read_text(encoding="utf-8"))["services"]
    added = {name: entry for name, entry in services.items() if name not in SERVICES}
    for name, entry in added.items():
        assert re.search(r":v?\d+\.\d+\.\d+$", entry["image"]), name
        for port in entry.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
    grafana = added["grafana"]["environment"]
    assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    # Else admin:admin is let in by its password.
    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert grafana["GF_AUTH_BASIC_ENABLED"] == "false"
    home = Path(grafana["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert f"./deploy/dashboards:{home.parent}:ro" in added["grafana"]["volumes"]
    assert (DEPLOY / "dashboards" / home.name).exists()
    traced = {name: services[name]["environment"]["FRESHET_OTLP_ENDPOINT"] for name in PROCESSES}
    assert set(traced.values()) == {"jaeger:4317"}


def test_redis_bounds_its_memory_and_keeps_what_it_was_told() -> None:
    flags = SERVICES["redis"].command
    settings = dict(zip(flags[1::2], flags[2::2], strict=True))
    assert settings["--appendonly"] == "yes"
    assert settings["--appendfsync"] == "everysec"
    assert settings["--maxmemory"].endswith("gb")
    assert settings["--port"] == str(DEFAULTS["redis"])


@pytest.mark.parametrize("row", PROCESSES.values(), ids=lambda row: row.name)
def test_the_image_is_its_roles(row: Process) -> None:
    built = RAW["services"][row.name]["build"]
    assert SERVICES[row.name].image.partition(":")[0] == f"freshet-{row.extra}"
    assert built["target"] == row.extra
    assert f"\nFROM process AS {row.extra}\n" in (REPOSITORY / built["dockerfile"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("row", PROCESSES.values(), ids=lambda row: row.name)
def test_weight_order_and_mounts_are_those_of_the_processs_row(row: Process) -> None:
    service = SERVICES[row.name]
    assert service.cpu_shares == row.cpu_shares
    assert service.needs == row.needs
    bundle, *volumes = RAW["services"][row.name]["volumes"]
    assert bundle == RAW["x-bundle"]
    mounts = {BUNDLE} | {str(mount).removesuffix(":ro").rpartition(":")[2] for mount in volumes}
    assert mounts == set(row.state)
    assert all(mount.endswith(":ro") for mount in volumes)
    environment = service.environment
    named = {
        BUNDLE: ("FRESHET_BUNDLE", BUNDLE),
        TEXT: ("FRESHET_TEXT", TEXT),
        CHECKPOINTS: ("FRESHET_REFRESHER_CHECKPOINTS", CHECKPOINTS),
        KEYS: ("FRESHET_API_KEYS", f"{KEYS}/api-keys.json"),
        SECRETS: ("FRESHET_PSEUDONYM_KEY_FILE", f"{SECRETS}/pseudonym-key"),
    }
    assert {folder for folder, (name, value) in named.items() if environment.get(name) == value} == set(row.state)


@pytest.mark.parametrize("row", PROCESSES.values(), ids=lambda row: row.name)
def test_a_process_serves_the_service_and_the_lag_of_its_row(row: Process) -> None:
    folders = (REPOSITORY / "services" / row.name, REPOSITORY / "services" / "catalogue")
    sources = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    package, _, service = row.health_service.rpartition(".")
    assert package == "freshet.v1"
    assert f'"{service}"' in sources or f"{service}Servicer" in sources
    for histogram in row.lag.values():
        assert histogram in sources or f'"{histogram.removeprefix(f"freshet_{row.name}_")}"' in sources


def test_nothing_runs_as_root_or_may_become_it() -> None:
    for name, entry in RAW["services"].items():
        assert entry["user"].split(":")[0] not in ("", "0", "root"), name
        assert entry["cap_drop"] == ["ALL"], name
        assert entry["security_opt"] == ["no-new-privileges:true"], name
        assert not entry.keys() & {"cap_add", "privileged", "devices", "pid", "network_mode", "userns_mode"}, name


def test_file_systems_are_read_only_but_for_volumes_and_memory() -> None:
    writable = {name for name, entry in RAW["services"].items() if not entry.get("read_only")}
    assert writable == {"kafka"}
    for name in RAW["services"].keys() - writable:
        assert RAW["services"][name]["tmpfs"] == ["/tmp:size=64m,mode=1777"], name


def test_the_images_user_is_the_one_that_containers_run_as() -> None:
    dockerfile = (REPOSITORY / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^USER (.*)$", dockerfile, re.MULTILINE) == ["10001:10001"]
    assert {RAW["services"][name]["user"] for name in ("keys", *PROCESSES)} == {"10001:10001"}
    assert "useradd --create-home --uid 10001 --gid 10001 freshet" in dockerfile


@pytest.mark.parametrize("overlay", [None, *OVERLAYS[:1]], ids=lambda path: "base" if path is None else path.stem)
def test_no_caller_of_the_inference_server_changes_what_it_serves(overlay: Path | None) -> None:
    command = (SERVICES if overlay is None else read_compose(overlay, environ={}))["inference-server"].command
    assert {"--model-control-mode=none", "--allow-sagemaker=false", "--allow-vertex-ai=false"} <= set(command)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_overlays_confine_what_they_add_and_loosen_nothing(overlay: Path) -> None:
    for name, entry in yaml.safe_load(overlay.read_text(encoding="utf-8"))["services"].items():
        if name not in SERVICES:
            assert (entry["cap_drop"], entry["security_opt"]) == (["ALL"], ["no-new-privileges:true"]), name
        else:
            assert not entry.keys() & {"user", "read_only", "cap_drop", "cap_add", "privileged", "security_opt"}, name
