"""The arms of the comparison: encoder, head, and the settings to tune within a given processor time.

The arms are those of the paper's Table 3 (arXiv:2407.15462) and two controls: a dot product at the mixture's bytes per
item, and a mixture without its mutual-information loss.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from services.offline.training.presets import TrainConfig, with_dot_head, with_sasrec, with_wide_dot_head

# A trial's settings that are fields of `TrainConfig`.
_FIELDS = ("loss", "num_negatives", "groups_per_tile", "head_rate", "gate_rate", "start_noise")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """An arm's setting. `regularised`: more dropout, encoder .3 and item .2.

    `component_width` is for mixtures; None means the preset's width. `rate` multiplies the learning rate of all
    parameters, `head_rate` that of the head's projections, and `gate_rate` that of the gate.
    """

    loss: str
    num_negatives: int = 64
    regularised: bool = False
    component_width: int | None = None
    groups_per_tile: int = 1
    gate_dropout: float = 0.0
    pair_dropout: float = 0.0
    rate: float = 1.0
    head_rate: float = 1.0
    gate_rate: float = 1.0
    start_noise: float = 0.0

    @property
    def text(self) -> str:
        """The setting for a table: the loss, its negatives, and values that are not the default."""
        parts = [self.loss if self.loss == "full-softmax" else f"{self.loss}, {self.num_negatives} negatives"]
        parts += ["more dropout"] if self.regularised else []
        others = (one for one in fields(self)[3:] if getattr(self, one.name) != one.default)
        return ", ".join([*parts, *(f"{one.name.replace('_', ' ')} {getattr(self, one.name):g}" for one in others)])

    def applied(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration with these settings; a gate or pair dropout above 0 replaces the preset's."""
        kept = config.dropouts
        kept = replace(kept, gate=self.gate_dropout or kept.gate, pair=self.pair_dropout or kept.pair)
        return replace(
            config,
            dropouts=replace(kept, encoder=0.3, item=0.2) if self.regularised else kept,
            head=replace(config.head, component_width=self.component_width or config.head.component_width),
            learning_rate=config.learning_rate * self.rate,
            **{name: getattr(self, name) for name in _FIELDS},
        )


Changes = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Arm:
    """`shaped` turns a preset's configuration (HSTU with the mixture) into this arm's; `tune` tries `changes`."""

    name: str
    title: str
    shaped: Callable[[TrainConfig], TrainConfig]
    changes: Changes

    @property
    def is_mixture(self) -> bool:
        return self.name.endswith(("mol", "no-mi"))


# The paper's loss, and its log-Q correction with 64 and 256 negatives. Mixtures omit the full softmax, which costs
# (items / negatives) times the sampled one. No arm tries `regularised`: it scored lower in 23 of 24 trials
# (docs/benchmarks/quality.json).
EVERY_ARM: Changes = (
    {"loss": "sampled-softmax"},
    {"loss": "corrected-softmax"},
    {"loss": "corrected-softmax", "num_negatives": 256},
)
_DOT_CHANGES: Changes = (
    *EVERY_ARM,
    {"loss": "full-softmax"},
    {"loss": "corrected-softmax", "num_negatives": 1024},
    *({"groups_per_tile": 4}, {"rate": 0.5}, {"rate": 2.0}),
)
_WIDE_DOT_CHANGES: Changes = (*_DOT_CHANGES, {"head_rate": 0.3}, {"head_rate": 3.0})
_MIXTURE_CHANGES: Changes = (
    *EVERY_ARM,
    *({"start_noise": 0.3}, {"gate_dropout": 0.2, "pair_dropout": 0.1}),
    *({"gate_rate": 0.3}, {"head_rate": 0.3}, {"groups_per_tile": 4}, {"rate": 2.0}, {"num_negatives": 1024}),
    *({"gate_rate": 3.0}, {"head_rate": 3.0}, {"component_width": 32}),
)


def tune(changes: Changes, seconds: float, tried: Callable[[Trial, float], tuple[float, float] | None]) -> Trial:
    """Return the best setting on validation among those that fit into `seconds` of processor time.

    Each change is made to the best setting so far; EVERY_ARM is always tried. `tried(trial, left)` returns a trial's
    score and seconds, or None if it would take more than `left`.
    """
    scores: dict[Trial, float] = {}
    for number, change in enumerate(changes):
        is_for_all = number < len(EVERY_ARM)
        if seconds <= 0 and not is_for_all:
            break
        best = max(scores, key=scores.__getitem__, default=Trial(loss="sampled-softmax"))
        trial = replace(best, **change)
        if trial.loss == "full-softmax":  # draws no negatives
            trial = replace(trial, num_negatives=64, groups_per_tile=1)
        found = None if trial in scores else tried(trial, math.inf if is_for_all else seconds)
        if found is not None:
            scores[trial] = found[0]
            seconds -= found[1]
    return max(scores, key=scores.__getitem__)


def _without_information(config: TrainConfig) -> TrainConfig:
    return replace(config, mutual_information_weight=0.0)


ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("sasrec-dot", "SASRec, dot product", lambda config: with_dot_head(with_sasrec(config)), _DOT_CHANGES),
        Arm("hstu-dot", "HSTU, dot product", with_dot_head, _DOT_CHANGES),
        Arm(
            "hstu-dot-wide", "HSTU, dot product at the mixture's bytes per item", with_wide_dot_head, _WIDE_DOT_CHANGES
        ),
        Arm("sasrec-mol", "SASRec, mixture", with_sasrec, _MIXTURE_CHANGES),
        Arm("hstu-mol", "HSTU, mixture", lambda config: config, _MIXTURE_CHANGES),
        Arm("hstu-mol-no-mi", "HSTU, mixture without mutual information", _without_information, _MIXTURE_CHANGES),
    )
}


def bytes_per_item(config: TrainConfig) -> int:
    """Return an item's bytes in float32: its components and, of a mixture, its gate."""
    head = config.head
    floats = head.num_item_components * head.component_width + (head.num_pairs if head.is_mixture else 0)
    return 4 * floats
