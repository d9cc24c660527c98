"""Run the independent parts of a job, in this process or on a Ray cluster (decision 071).

If a Ray worker dies, its part restarts on another worker. Every worker needs this Freshet version and the same bundle.
"""

import logging
import socket
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from services.algorithms.bundles.model_bundle import BundleError, load_bundle
from services.platform.errors import FreshetError, PreconditionFailed
from services.stack.version import freshet_version

# Maximum restarts of a part. A limit is needed because a part that does not fit in memory kills every worker.
RETRIES = 3
_CONNECT_S, _TRIES = 5.0, 3
# Installed on every worker.
_PACKAGE = "freshet-recsys[cli,encode,cpu,ray]"

R = TypeVar("R")


def run_parts(
    calls: Mapping[int, Callable[[], R]], done: Callable[[int, R], None], *, bundle: Path, on: str | None = None
) -> None:
    """Make every call, and pass its number and result to `done`, in the order of completion.

    calls: must be picklable, with functions that a worker can import. bundle: absolute path of the bundle that the
    calls read. on: address of a Ray cluster for `ray.init`; None runs the calls in this process.
    Raises: the first exception of a call, which names the worker's machine; PreconditionFailed for an unusable worker
    or cluster, a missing package ray, or a part whose workers died repeatedly.
    """
    wanted = freshet_version(), load_bundle(bundle, verify=False).model_version
    if on is None or not calls:
        for number, call in calls.items():
            done(number, call())
        return
    ray = _connected(on)
    try:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_on_worker)
        numbers = {task.remote(call, bundle, *wanted): number for number, call in calls.items()}
        while numbers:
            (ready,), _ = ray.wait(list(numbers), num_returns=1)
            number = numbers.pop(ready)
            done(number, _result(ray, ready, number))
    except ConnectionError as exc:
        raise PreconditionFailed(
            f"the Ray cluster at {on} broke the connection ({_detail(exc)}): its head node, too, runs freshet-recsys"
        ) from exc
    finally:
        ray.shutdown()


def _on_worker(call: Callable[[], R], bundle: Path, version: str, model_version: str) -> R | FreshetError | BundleError:
    """Return the call's result or its error. The error is not raised, because Ray would print it."""
    try:
        _check(bundle, version, model_version)
        return call()
    except (FreshetError, BundleError) as exc:
        return type(exc)(f"Ray worker on {socket.gethostname()}: {exc}")


def _check(bundle: Path, version: str, model_version: str) -> None:
    """Raises: PreconditionFailed if this worker has another version, or lacks the bundle."""
    if (mine := freshet_version()) != version:
        raise PreconditionFailed(f"runs freshet-recsys {mine}, this command {version}: install the same one there")
    try:
        found = load_bundle(bundle, verify=False).model_version
    except (BundleError, OSError) as exc:
        raise PreconditionFailed(f"no bundle at {bundle} ({exc}): copy the one of model {model_version} there") from exc
    if found != model_version:
        raise PreconditionFailed(f"model {found} at {bundle}, not {model_version}: copy that bundle there")


def _result(ray: Any, ready: Any, number: int) -> Any:
    try:
        found = ray.get(ready)
    except ray.exceptions.RayTaskError as exc:
        if not isinstance(exc.cause, ImportError):
            raise
        raise PreconditionFailed(
            f"a Ray worker cannot import what it is to run ({exc.cause}): install {_PACKAGE} there"
        ) from exc
    except ray.exceptions.RayError as exc:
        raise PreconditionFailed(
            f"part {number}: its Ray workers died {RETRIES + 1} times, or the cluster is gone ({exc})"
        ) from exc
    if isinstance(found, FreshetError | BundleError):
        raise found
    return found


def _detail(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if len(line.strip()) > 2] or [repr(exc)]
    return next((line for line in lines if line.startswith("details = ")), lines[-1])


def _connected(address: str) -> Any:
    try:
        import ray
    except ModuleNotFoundError as exc:
        raise PreconditionFailed(
            f"--on {address} needs the package ray: pip install 'freshet-recsys[ray]' here, and '{_PACKAGE}' there"
        ) from exc
    parts = urllib.parse.urlsplit(address if "://" in address else f"//{address}")
    try:
        if parts.port is not None:
            # ray.init tries for half a minute before it fails.
            socket.create_connection((parts.hostname or "", parts.port), _CONNECT_S).close()
        logging.getLogger("ray").setLevel(logging.WARNING)
        _init(ray, address)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as exc:
        raise PreconditionFailed(
            f"no Ray cluster at {address!r} ({_detail(exc)}); allowed: ray://HOST:10001 of a running head node, or auto"
        ) from exc
    return ray


def _init(ray: Any, address: str) -> None:
    """Connect to Ray; retry, because a busy head node may not start a client's process in time."""
    for tries_left in reversed(range(_TRIES)):
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
            return
        except ConnectionError:
            if not tries_left:
                raise
