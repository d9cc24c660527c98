"""Training state on disk: tensors in safetensors, everything else in JSON.

A checkpoint is one directory, written under a temporary name and renamed. A training with another configuration or
other data rejects it.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FORMAT = 1
_TENSORS, _PROGRESS = "state.safetensors", "progress.json"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(kw_only=True, slots=True)
class Progress:
    """The state of a training. A resumed training adds to `part_seconds`, `seconds` and `cpu_seconds` (all threads)."""

    epoch: int = 0
    next_batch: int = 0
    positions: int = 0
    loss_sum: float = 0.0
    epoch_positions: int = 0
    seconds: float = 0.0
    part_seconds: dict[str, float] = field(default_factory=dict)
    epoch_losses: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    # Both lists have an entry per finished epoch: processor seconds so far, and any validation score.
    epoch_cpu_seconds: list[float] = field(default_factory=list)
    valid_scores: list[float] = field(default_factory=list)

    def start_epoch(self, epoch: int) -> None:
        self.epoch, self.next_batch, self.loss_sum, self.epoch_positions = epoch, 0, 0.0, 0


def save(
    folder: Path,
    identity: Mapping[str, Any],
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generators: Mapping[str, Tensor],
    best_weights: Mapping[str, Tensor],
) -> None:
    """Write a checkpoint and remove older ones.

    `identity`: configuration and data fingerprint. `best_weights`: weights of the best epoch on validation, if any.
    """
    tensors = {f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors.update(
            {f"optimizer.{name}.{moment}": optimizer.state[parameter][moment] for moment in _MOMENTS}
            if parameter in optimizer.state
            else {}
        )
    tensors.update({f"generator.{name}": state for name, state in generators.items()})
    tensors.update({f"best.{name}": value for name, value in best_weights.items()})
    target = folder / f"{progress.positions:012d}"
    aside = folder / f".{target.name}.writing"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(tensors, aside / _TENSORS)
    content = {"format": FORMAT, "identity": dict(identity), "progress": asdict(progress)}
    (aside / _PROGRESS).write_text(json.dumps(content, indent=2), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    for older in folder.iterdir():
        if older != target:
            shutil.rmtree(older)


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the newest checkpoint's configuration as plain values, if any."""
    found = sorted(folder.glob(f"[0-9]*/{_PROGRESS}"))
    return dict(json.loads(found[-1].read_text(encoding="utf-8"))["identity"]["config"]) if found else None


def load(
    folder: Path,
    identity: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> tuple[Progress, dict[str, Tensor], dict[str, Tensor]] | None:
    """Restore the newest checkpoint, if any; return progress, the generators' states and the best weights so far.

    Raises: ValueError if the format differs, or naming the first field of configuration or data that differs.
    """
    found = sorted(path for path in folder.glob("[0-9]*") if path.is_dir()) if folder.is_dir() else []
    if not found:
        return None
    newest = found[-1]
    content = json.loads((newest / _PROGRESS).read_text(encoding="utf-8"))
    if content.get("format") != FORMAT:
        raise ValueError(f"{newest}: format={content.get('format')}; this program reads format {FORMAT}")
    _check_identity(newest, content["identity"], json.loads(json.dumps(dict(identity))))
    tensors = load_file(newest / _TENSORS)
    model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model.")})
    for name, parameter in model.named_parameters():
        if f"optimizer.{name}.step" in tensors:
            # A fused optimizer needs the number of steps on the device, too.
            optimizer.state[parameter] = {
                moment: tensors[f"optimizer.{name}.{moment}"].to(parameter.device) for moment in _MOMENTS
            }
    generators = {name[10:]: value for name, value in tensors.items() if name.startswith("generator.")}
    best_weights = {name[5:]: value for name, value in tensors.items() if name.startswith("best.")}
    return Progress(**content["progress"]), generators, best_weights


def _check_identity(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], owner: str = "") -> None:
    for name in sorted(found.keys() | wanted.keys()):
        ours, theirs = wanted.get(name), found.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            _check_identity(path, theirs, ours, f"{owner}{name}.")
        elif ours != theirs:
            raise ValueError(f"{path} was made with {owner}{name}={theirs!r}; this training has {ours!r}. "
                             "Resume with the same settings, or start afresh.")  # fmt: skip
