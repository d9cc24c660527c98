"""The demo's steps that call other parts of Freshet: training, export, the stack's start, and the import."""

import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from services.algorithms.bundles.model_bundle import ENCODER_ONNX, Bundle, BundleError, load_bundle
from services.offline.datasets import Interactions
from services.offline.demo.display import Display, Stopwatch
from services.offline.openmp import wait_without_spinning
from services.stack import Ports, Stack, StackError
from services.stack.version import freshet_version

DEFAULT_STATE_DIR = Path(".freshet")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """The user's options; the defaults follow the replay protocol."""

    dataset: str = "auto"
    events: int = 24_000
    rate_per_s: float = 100.0
    epochs: int | None = None
    seed: int = 0
    state_dir: Path = DEFAULT_STATE_DIR
    keep: bool = False
    reuse: bool = False
    port_offset: int = 0
    with_console: bool = True

    @property
    def folder(self) -> Path:
        """Return the folder of the summary, the plots and the replay's files."""
        return self.state_dir / "demo"

    @property
    def bundle(self) -> Path:
        return self.state_dir / "bundle"


# Eight epochs of MovieLens-1M's past take three minutes on two cores.
_MAX_POSITIONS = 6_600_000
_MAX_EPOCHS = 8
# The head is fixed because choosing it would take as long as training. Served validation NDCG@10 on MovieLens-1M, split
# by time, after equal processor time: dot product .176 (12 epochs), mixture .167 (4 epochs); one seed.
_HEAD = "dot"
# Parts whose stored data would mix an earlier demo's stream into this demo's stream.
_STREAM_DATA = {"kafka": "Apache Kafka", "redis": "Redis", "refresher": "the refresher"}
# The stack's messages that the demo does not print.
_ROUTINE = ("starting", "stopping", "stopped")
_NAMES = {"kafka": "Apache Kafka", "redis": "Redis", "inference-server": "Triton Inference Server"}


def train_and_export(
    data: Interactions, past: Interactions, options: DemoOptions, display: Display, clock: Stopwatch
) -> Bundle:
    """Train preset quick on `past`, the first part of `data` by time, and write the bundle; report hit rates on the
    later events.

    With `reuse`, a bundle trained on exactly this past is used.
    """
    if options.reuse and (found := _trained_on(past, options.bundle)) is not None:
        display.fact(f"model {found.model_version} was trained on the same past; it is used again")
        return found
    wait_without_spinning()
    from services.offline.training.export import export_bundle
    from services.offline.training.run import run_training

    with clock.part("train"):
        run_training(
            out=options.bundle,
            preset_name="quick",
            interactions=data,
            epochs=options.epochs or _default_epochs(past),
            seed=options.seed,
            split="time",
            head=_HEAD,
            export=False,
            console=display.console,
        )
    display.step("export", "the encoder as ONNX, compared with PyTorch on real histories")
    with clock.part("export"):
        report = export_bundle(options.bundle, interactions=data)
    display.fact(
        f"model {report.bundle.model_version}, {report.onnx_bytes / 1e6:.1f} MB, largest difference "
        f"{report.max_error:.1e} over {report.histories_checked} histories"
    )
    return load_bundle(options.bundle)


def expected_seconds(options: DemoOptions, past: Interactions) -> dict[str, float]:
    """Return expected seconds of the data-dependent steps on two cores, which train 35,000 positions a second."""
    epochs = options.epochs or _default_epochs(past) or _MAX_EPOCHS
    return {"training": len(past) * (epochs / 35_000 + 1 / 40_000), "past": len(past) / 28_000}


def _default_epochs(past: Interactions) -> int | None:
    """Return as many epochs as fit in some minutes; None, for a small past, means the preset's number."""
    allowed = max(1, _MAX_POSITIONS // max(1, len(past)))
    return allowed if allowed <= _MAX_EPOCHS else None


def _trained_on(past: Interactions, path: Path) -> Bundle | None:
    try:
        bundle = load_bundle(path)
    except BundleError:
        return None
    same = bundle.manifest.data.get("fingerprint") == past.fingerprint()
    return bundle if same and ENCODER_ONNX in bundle.manifest.files else None


def make_stack(options: DemoOptions, display: Display) -> Stack:
    """Return the stack with this demo's bundle."""
    ports = Ports.default(offset=options.port_offset) if options.port_offset else None

    def say(part: str, doing: str) -> None:
        if doing not in _ROUTINE:
            display.fact(f"{part}: {doing}")

    # The refresher encodes titles at its start, so that searches find new items by title.
    os.environ.setdefault("FRESHET_REFRESHER_TEXT_ENCODER", "minilm")
    return Stack(options.state_dir, bundle=options.bundle, ports=ports, console=options.with_console, say=say)


def require_free(stack: Stack, options: DemoOptions) -> None:
    """Check the state folder. Raises: StackError if parts run in it, or if its stream was not made by a demo."""
    in_use = [part.name for part in stack.status() if part.running]
    if not options.folder.exists():
        in_use += [str(folder) for part in _STREAM_DATA if (folder := stack.place.state.data(part)).exists()]
    if in_use:
        problem = f"{options.state_dir} has {', '.join(in_use)}; a demo deletes the stream and the states of its folder"
        raise StackError("state", problem, advice="another --state, or `freshet down` where a demo's stack runs")


def prepare(stack: Stack) -> None:
    """Fetch missing components and check the ports, before minutes of training.

    Raises: StackError; PortTaken.
    """
    stack.prepare()
    taken = next(stack.ports.taken(), None)
    if taken is not None:
        raise taken


# `import_past` starts the refresher before the import, because encoding titles takes as long as the import. It starts
# the encoder after the import, because the encoder would apply the records one by one.
LATER = ("refresher", "encoder")


def start(stack: Stack, display: Display) -> None:
    """Delete this folder's stream and states, and start everything but LATER."""
    for part, says in _STREAM_DATA.items():
        folder = stack.place.state.data(part)
        if folder.exists():
            display.fact(f"dropping what {says} kept of an earlier run")
            shutil.rmtree(folder)
    stack.up([part for part in stack.parts if part not in LATER])


def components(stack: Stack) -> dict[str, str]:
    """Return the components by name, with the running parts' versions."""
    running = {name: printed for part, printed in stack.versions().items() if (name := _NAMES.get(part))}
    return {name: printed.removeprefix(name).strip() for name, printed in running.items()} | {
        "Freshet (gateway, encoder, refresher, candidates, reranker, generator)": freshet_version(),
        "Python": platform.python_version(),
        "PyTorch": version("torch"),
        "gRPC": version("grpcio"),
    }


def stop(stack: Stack, display: Display) -> None:
    """Stop the stack; report a part that does not stop, without hiding an earlier error."""
    try:
        stopped = stack.down()
    except StackError as error:
        display.fact(f"not everything stopped: {error}")
        return
    if stopped:
        display.fact(f"stopped: {', '.join(stopped)}")


def import_past(past: Interactions, stack: Stack, display: Display) -> dict[str, str]:
    """Import the past, with all users' histories, seen items and states; start LATER; return the components."""
    from services.offline.backfill.jobs import import_interactions

    with ThreadPoolExecutor(1) as pool, display.progress() as bar:
        refresher = pool.submit(stack.up, LATER[:1], timeout_s=300.0)
        tasks = {"write": bar.add_task("to Kafka", total=None), "states": bar.add_task("to Redis", total=None)}

        def on_progress(phase: str, done: int, total: int) -> None:
            bar.update(tasks[phase], completed=done, total=total)

        report = import_interactions(
            past,
            bundle=stack.bundle,
            kafka=stack.kafka_bootstrap,
            redis_url=stack.redis_url,
            inference_server=stack.address("inference-server"),
            # The model was trained on these events: attributions would count them twice.
            attributes=False,
            progress=on_progress,
        )
        refresher.result()
    stack.up(LATER)
    display.fact(
        f"{report.interactions:,} events of {report.users_filled:,} users; "
        f"{report.fill_seconds:.0f} s for histories and states"
    )
    return components(stack)
