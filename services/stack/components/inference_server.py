"""Triton Inference Server from the nvidia-pytriton wheel, in its own environment (NumPy 1.x).

The wheel has no ONNX Runtime backend, so config.pbtxt runs ONNX Runtime inside a Python-backend model.
"""

import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from shutil import copy2

from services.stack.children import Launch
from services.stack.components import component
from services.stack.compose import local_environment
from services.stack.errors import StackError
from services.stack.folders import REPOSITORY, build_once, cache_root, recipe_key
from services.stack.ports import LOOPBACK
from services.stack.probes import probe_inference_server

RECIPE = REPOSITORY / "deploy" / "inference_server" / "requirements.txt"
# Stub and server exchange tensors through shared memory, which starts with one megabyte instead of 64.
_BACKEND_FLAGS = (
    "--backend-config=python,shm-default-byte-size=1048576",
    "--backend-config=python,shm-growth-byte-size=1048576",
    "--backend-config=python,stub-timeout-seconds=60",
)


_SHARED_MEMORY = Path("/dev/shm")


class InferenceServer(component.Component):
    """The server of the sequence encoder and, with a text bundle, the text encoders."""

    @property
    def folder(self) -> Path:
        """Its environment, with the backend folder."""
        return cache_root() / f"inference-server-{recipe_key(RECIPE)}"

    @property
    def _packages(self) -> Path:
        return self.folder / "lib" / f"python{_python_version()}" / "site-packages"

    def missing(self) -> tuple[str, str] | None:
        if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
            return "its wheel is made for Linux only", "docker compose up inference-server"
        if _python_library() is None:
            return (
                f"no libpython{_python_version()}.so, which the Python backend loads",
                f"apt-get install -y libpython{_python_version()}",
            )
        return None

    def prepare(self, say: component.Say) -> None:
        super().prepare(say)

        def build(folder: Path) -> None:
            say(self.name, "building its environment (once, 300 MB)")
            advice = "check the network, or pip's settings for a mirror"
            component.run_installer(self.name, component.venv_command(folder), advice=advice)
            python = str(folder / "bin" / "python")
            component.run_installer(self.name, component.install_command(python, RECIPE), advice=advice)
            self._gather_backend(folder / "backends" / "python")

        build_once(self.folder, build, in_place=True)

    def _gather_backend(self, backend: Path) -> None:
        """Copy backend and stub into one folder, where the server expects both."""
        wheel = self._packages / "pytriton" / "tritonserver"
        stubs = wheel / "python_backend_stubs" / _python_version()
        if not stubs.is_dir():
            raise StackError(self.name, f"its wheel has no Python backend stub for Python {_python_version()}")
        backend.mkdir(parents=True)
        for source in (*(wheel / "backends" / "python").iterdir(), *stubs.iterdir()):
            copy2(source, backend / source.name)

    def launch(self, place: component.Place) -> Launch:
        models = place.bundle / "inference_server"
        if not (models / "encoder" / "config.pbtxt").exists():
            raise StackError(
                self.name, f"{models} holds no model folder `encoder`", advice=f"freshet export --bundle {place.bundle}"
            )
        ports = place.ports
        own = {
            "--http-port": str(ports["inference-server-http"]),
            "--grpc-port": str(ports["inference-server"]),
            "--metrics-port": str(ports["inference-server-metrics"]),
            "--http-address": LOOPBACK,
            "--grpc-address": LOOPBACK,
            "--metrics-address": LOOPBACK,
            "--backend-directory": str(self.folder / "backends"),
            "--disable-auto-complete-config": "",
            # Omitted, because it selects the native backend's configuration, which is for the container.
            "--model-config-name": None,
        }
        prefix = shared_memory_prefix(place)
        # The server is not running, so a killed one left these files.
        for left in _SHARED_MEMORY.glob(f"{prefix}*"):
            left.unlink(missing_ok=True)
        flags = dict(flag.partition("=")[::2] for flag in self.service.command[1:]) | own
        program = self._packages / "pytriton" / "tritonserver" / "bin" / "tritonserver"
        flags["--model-repository"] = str(models)
        arguments = [f"{flag}={value}" if value else flag for flag, value in flags.items() if value is not None]
        return Launch(
            argv=[
                str(program),
                *arguments,
                *_BACKEND_FLAGS,
                f"--backend-config=python,shm-region-prefix-name={prefix}",
            ],
            environment=self._environment(place),
            cwd=place.state.root,
        )

    def _environment(self, place: component.Place) -> dict[str, str]:
        environment = component.inherited_environment()
        python_library = _python_library()
        libraries = [str(self._packages / "nvidia_pytriton.libs"), str(python_library) if python_library else ""]
        return environment | {
            # The stub embeds Python; these variables set its packages.
            "VIRTUAL_ENV": str(self.folder),
            "PYTHONPATH": str(self._packages),
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{environment.get('PATH', '')}",
            "LD_LIBRARY_PATH": os.pathsep.join(folder for folder in libraries if folder),
            **local_environment(self.service, place.ports, place.bundle, place.text),
        }

    def probe(self, place: component.Place) -> str | None:
        return probe_inference_server(place.ports.address("inference-server"))

    def version(self, place: component.Place) -> str:
        """Return the version in the metadata."""
        import grpc
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        with grpc.insecure_channel(place.ports.address("inference-server")) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                metadata = stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=2)
            except grpc.RpcError as exc:
                raise StackError(self.name, f"does not tell its version: {exc.code().name}") from exc
        return f"Triton Inference Server {metadata.version}"


def shared_memory_prefix(place: component.Place) -> str:
    return f"freshet_{hashlib.sha256(str(place.state.root).encode()).hexdigest()[:12]}_"


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _python_library() -> Path | None:
    folders = [
        sysconfig.get_config_var("LIBDIR"),
        sysconfig.get_config_var("LIBPL"),
        str(Path(sys.base_prefix) / "lib"),
    ]
    folders += ["/usr/lib", f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/local/lib"]
    for folder in folders:
        if folder and any(Path(folder).glob(f"libpython{_python_version()}.so*")):
            return Path(folder)
    return None
