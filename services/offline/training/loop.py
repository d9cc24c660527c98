"""The training loop. It is seeded, resumes with identical bits, and times each part.

The backward pass is split at the encoder's output, to time encoder and head separately. All randomness comes from the
configuration's seed, and checkpoints store its state.

Letters: N positions of a batch, D encoder width.
"""

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.algorithms.encoding.absence import buckets_of
from services.offline.datasets import Interactions
from services.offline.training import checkpoint
from services.offline.training.loss import batch_loss
from services.offline.training.models.sequential import PADDING, SequentialModel
from services.offline.training.presets import TrainConfig
from services.offline.training.seeded import seeded
from services.offline.training.sequences import Batch, EpochBatches, Histories, IntArray

PARTS = ("data", "encoder", "mol", "optimizer")
_SECONDS_BETWEEN_CHECKPOINTS = 30.0
# The second moment adapts within tens of steps: a run of `quick` has some thousand.
_BETAS = (0.9, 0.98)
# Factor of the absence rows' learning rate; it is high because few positions follow an absence.
_ABSENCE_RATE = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Progress after each step. `loss` is the mean ranking loss of the epoch so far."""

    epoch: int
    num_epochs: int
    positions: int
    total_positions: int
    positions_per_s: float
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """The trained model and its costs. `seconds`, `cpu_seconds` (of all threads) and `part_shares` exclude checkpoints
    and evaluation; memory is the process's or, on CUDA, the GPU's. `valid_scores` and `epoch_cpu_seconds` have one
    entry per finished epoch.
    """

    model: SequentialModel
    positions: int
    seconds: float
    part_shares: dict[str, float]
    epoch_losses: list[float]
    peak_memory_bytes: int
    user_index: IntArray | None
    valid_scores: list[float]
    cpu_seconds: float
    epoch_cpu_seconds: list[float]

    @property
    def positions_per_s(self) -> float:
        return self.positions / max(self.seconds, 1e-9)


ProgressListener = Callable[[Step], None]
# Returns a score, higher for a better model. It must not change the model or the random generators.
Validate = Callable[[SequentialModel], float]
Result = TypeVar("Result")


def train(
    config: TrainConfig,
    interactions: Interactions,
    *,
    out: Path | None = None,
    progress: ProgressListener | None = None,
    resume: bool = False,
    device: str = "cpu",
    stop_after_batches: int | None = None,
    validate: Validate | None = None,
    build: Callable[..., SequentialModel] = SequentialModel,
) -> TrainReport:
    """Train on every event of `interactions`, whose vocabularies may be larger.

    Checkpoints go to `out`. `resume` continues from the newest one, with the same bits as without interruption (same
    threads and machine). `stop_after_batches` ends early, with a checkpoint. `validate` evaluates every epoch, outside
    the counted seconds, and the report has the best epoch's model. `build` makes the model from the arguments of
    `SequentialModel`.
    Raises: ValueError if no user has two events, or if a checkpoint belongs to another configuration or data.
    """
    with seeded(config.seed, device):
        run = _Run(config, interactions, out, device, validate, build)
        if resume:
            run.resume()
        run.go(progress or (lambda step: None), stop_after_batches)
        return run.report()


def dense_users(config: TrainConfig, interactions: Interactions) -> IntArray | None:
    """Return each user's dense index (U,), -1 for users without training events; None without user-id
    component.
    """
    if not config.encoder.uses_user_index:
        return None
    trained = interactions.user_counts() > 0
    return np.where(trained, np.cumsum(trained) - 1, -1)


class _Run:
    def __init__(
        self,
        config: TrainConfig,
        interactions: Interactions,
        out: Path | None,
        device: str,
        validate: Validate | None,
        build: Callable[..., SequentialModel],
    ) -> None:
        self.validate = validate
        self.best_weights: dict[str, Tensor] = {}
        self.config, self.folder, self.device = config, out, torch.device(device)
        self.histories = Histories.of(interactions)
        self.total_positions = self.histories.num_positions * config.epochs
        if not self.total_positions:
            raise ValueError(f"{interactions.name}: no user has two events; training needs a next event to predict")
        self.identity: dict[str, Any] = {"config": config.as_dict(), "data": interactions.fingerprint()}
        self.user_index = dense_users(config, interactions)
        self.negatives = torch.Generator().manual_seed(config.seed)
        self.model = build(
            config.encoder,
            config.head,
            num_items=interactions.num_items,
            num_users=0 if self.user_index is None else int(self.user_index.max()) + 1,
            dropouts=config.dropouts,
            start_noise=config.start_noise,
            absence=config.absence if interactions.has_times else None,
        ).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self._parameter_groups(),
            lr=config.learning_rate,
            betas=_BETAS,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.progress = checkpoint.Progress(part_seconds=dict.fromkeys(PARTS, 0.0))
        self.whole_batches = WholeBatches.of(self.model, config) if self.device.type == "cuda" else None

    def resume(self) -> None:
        if self.folder is None:
            return
        restored = checkpoint.load(self.folder, self.identity, self.model, self.optimizer)
        if restored is None:
            return
        self.progress, generators, self.best_weights = restored
        torch.set_rng_state(generators["torch"])
        self.negatives.set_state(generators["negatives"])
        if "cuda" in generators:
            torch.cuda.set_rng_state(generators["cuda"], self.device)

    def go(self, listener: ProgressListener, stop_after_batches: int | None) -> None:
        self.model.train()
        progress, saved_at, batches_done = self.progress, time.monotonic(), 0
        while progress.epoch < self.config.epochs:
            batches = self._timed("data", lambda: self._batches(progress.epoch))
            while progress.next_batch < len(batches):
                self._step(batches)
                listener(self._describe())
                batches_done += 1
                if stop_after_batches == batches_done:
                    self._save()
                    return
                if time.monotonic() - saved_at > _SECONDS_BETWEEN_CHECKPOINTS:
                    self._save()
                    saved_at = time.monotonic()
            progress.epoch_losses.append(progress.loss_sum / progress.epoch_positions)
            progress.epoch_cpu_seconds.append(progress.cpu_seconds)
            self._judge()
            progress.start_epoch(progress.epoch + 1)
            self._save()

        if self.best_weights:
            self.model.load_state_dict(self.best_weights)

    def _judge(self) -> None:
        if self.validate is None:
            return
        scores = self.progress.valid_scores
        scores.append(self.validate(self.model))
        self.model.train()
        if scores[-1] == max(scores) and scores.count(scores[-1]) == 1:
            self.best_weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def report(self) -> TrainReport:
        self.model.fill_absences()
        parts = self.progress.part_seconds
        total = sum(parts.values()) or 1.0
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return TrainReport(
            model=self.model.eval(),
            positions=self.progress.positions,
            seconds=self.progress.seconds,
            part_shares={part: parts[part] / total for part in PARTS},
            epoch_losses=list(self.progress.epoch_losses),
            peak_memory_bytes=peak,
            user_index=self.user_index,
            valid_scores=list(self.progress.valid_scores),
            cpu_seconds=self.progress.cpu_seconds,
            epoch_cpu_seconds=list(self.progress.epoch_cpu_seconds),
        )

    def _batches(self, epoch: int) -> EpochBatches:
        return EpochBatches(
            self.histories,
            max_history=self.config.encoder.max_history,
            batch_sequences=self.config.batch_sequences,
            seed=self.config.seed,
            epoch=epoch,
        )

    def _step(self, batches: EpochBatches) -> None:
        progress = self.progress
        batch = self._timed("data", lambda: batches[progress.next_batch])
        encoded = self._timed("encoder", lambda: self._encode(batch))
        cut = encoded.detach().requires_grad_()
        loss = self._timed("mol", lambda: self._head(batch, cut))
        self._timed("encoder", lambda: torch.autograd.backward(encoded, cut.grad))
        self._timed("optimizer", self._update)
        progress.loss_sum += loss * len(batch.targets)
        progress.positions += len(batch.targets)
        progress.epoch_positions += len(batch.targets)
        progress.next_batch += 1

    def _encode(self, batch: Batch) -> Tensor:
        items, times = torch.from_numpy(batch.items).to(self.device), torch.from_numpy(batch.times).to(self.device)
        whole = self.whole_batches if len(items) == self.config.batch_sequences else None
        encoded = (whole or self.model).encode(items, times).flatten(0, 1)
        chosen = encoded.index_select(0, torch.from_numpy(batch.positions).to(self.device))
        if batch.outcomes is None or self.model.outcome_embedding is None:
            return chosen
        outcomes: Tensor = self.model.outcome_embedding(torch.from_numpy(batch.outcomes).to(self.device))
        return chosen + outcomes

    def _head(self, batch: Batch, cut: Tensor) -> float:
        users = None
        if self.user_index is not None:
            owners = batch.users[batch.positions // batch.items.shape[1]]
            users = torch.from_numpy(self.user_index[owners]).to(self.device)
        targets = torch.from_numpy(batch.targets).to(self.device)
        absence = self.model.absence_shape
        buckets = None if absence is None else torch.from_numpy(buckets_of(batch.gaps, absence)).to(self.device)
        loss = batch_loss(self.model, self.config, cut, users, targets, self.negatives, buckets)
        torch.autograd.backward(loss.total)
        return float(loss.ranking)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        groups: dict[float, list[torch.nn.Parameter]] = {}
        for name, parameter in self.model.named_parameters():
            factor = 1.0 if not name.startswith("head.") else self.config.head_rate
            factor = _ABSENCE_RATE if name.startswith("absence_") else factor
            groups.setdefault(self.config.gate_rate if "_gate." in name else factor, []).append(parameter)
        return [{"params": parameters, "factor": factor} for factor, parameters in groups.items()]

    def _update(self) -> None:
        rate = self.config.learning_rate * rate_factor(self.config, self.progress.positions / self.total_positions)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _timed(self, part: str, work: Callable[[], Result]) -> Result:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        result = work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed = time.perf_counter() - begin
        self.progress.part_seconds[part] += elapsed
        self.progress.seconds += elapsed
        self.progress.cpu_seconds += time.process_time() - cpu_begin
        return result

    def _describe(self) -> Step:
        progress = self.progress
        return Step(
            epoch=progress.epoch,
            num_epochs=self.config.epochs,
            positions=progress.positions,
            total_positions=self.total_positions,
            positions_per_s=progress.positions / max(progress.seconds, 1e-9),
            loss=progress.loss_sum / progress.epoch_positions,
        )

    def _save(self) -> None:
        if self.folder is None:
            return
        generators = {"torch": torch.get_rng_state(), "negatives": self.negatives.get_state()}
        if self.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.device)
        checkpoint.save(
            self.folder, self.identity, self.progress, self.model, self.optimizer, generators, self.best_weights
        )


class WholeBatches(torch.nn.Module):
    """The encoder as two CUDA graphs, forward and backward, for full batches padded to the longest history.

    Without graphs, a host needed 40 ms to launch the operations of an ML-1M step that took 10 ms on its H200.
    """

    def __init__(self, model: SequentialModel) -> None:
        super().__init__()
        self._encoder, self._model = model.encoder, [model]  # the list hides its parameters from this module

    @classmethod
    def of(cls, model: SequentialModel, config: TrainConfig) -> "WholeBatches":
        made, shape = cls(model), (config.batch_sequences, config.encoder.max_history)
        device = model.item_embedding.weight.device
        events = torch.zeros((*shape, config.encoder.width), device=device, requires_grad=True)
        torch.cuda.make_graphed_callables(made, (events, torch.zeros(shape, dtype=torch.int64, device=device)))
        return made

    def forward(self, embedded: Tensor, times: Tensor) -> Tensor:
        encoded: Tensor = self._encoder(embedded, times)
        return encoded

    def encode(self, items: Tensor, times: Tensor) -> Tensor:
        """Do what `SequentialModel.encode` does."""
        length = items.shape[1]
        missing = self._model[0].encoder_shape.max_history - length
        items, times = functional.pad(items, (0, missing), value=PADDING), functional.pad(times, (0, missing))
        encoded: Tensor = self(self._model[0].embedded(items), times)
        return encoded[:, :length]


def rate_factor(config: TrainConfig, done: float) -> float:
    """Return the learning rate's factor after a share `done` of the training: linear warm-up, then half a cosine."""
    if done < config.warmup_fraction:
        return max(done / config.warmup_fraction, 1e-3)
    falling = (done - config.warmup_fraction) / max(1.0 - config.warmup_fraction, 1e-9)
    lowest = config.final_rate_fraction
    return lowest + (1.0 - lowest) * 0.5 * (1.0 + math.cos(math.pi * falling))
