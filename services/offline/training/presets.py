"""Named training configurations: `quick` for a few minutes on two cores, and the three of the authors."""

import math
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from typing import Any

from services.algorithms.bundles.model_manifest import AbsenceShape, EncoderShape, HeadShape
from services.offline.training.models.mol import Dropouts

# A mixture against the whole catalogue at every position would cost X / K times its sampled softmax.
LOSSES = ("sampled-softmax", "corrected-softmax", "full-softmax")


@dataclass(frozen=True, kw_only=True, slots=True)
class SasRecSettings:
    """The settings in which the authors' SASRec differs from their HSTU, for `with_sasrec`."""

    num_blocks: int
    num_heads: int
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A training's settings. `learning_rate` is the peak, after the warm-up. Raises: ValueError naming field, value and
    range.
    """

    encoder: EncoderShape
    head: HeadShape
    epochs: int
    seed: int = 0
    dropouts: Dropouts = Dropouts()  # noqa: RUF009 - frozen
    num_negatives: int
    # About how many negatives of a position estimate a mixture's gradient on a CPU; 0: all.
    backward_negatives: int = 0
    batch_sequences: int
    learning_rate: float
    weight_decay: float = 1e-3
    warmup_fraction: float = 0.0
    final_rate_fraction: float = 1.0
    mutual_information_weight: float = 0.001
    user_norm_weight: float = 0.0
    loss: str = "sampled-softmax"
    # A group's positions share negatives: more groups give more distinct negatives a step.
    groups_per_tile: int = 1
    # Factors of `learning_rate`, for the head's projections and for its gate.
    head_rate: float = 1.0
    gate_rate: float = 1.0
    # If 0, a mixture's query component p starts as item component p mod P_x; else all start as one map plus this noise.
    start_noise: float = 0.0
    # Small data gets more epochs, to train on this many positions.
    default_min_positions: int = 0
    # Used if the data have times; None disables absences.
    absence: AbsenceShape | None = None
    # Settings that the baselines change.
    sasrec: SasRecSettings | None = None
    dot_weight_decay: float | None = None

    def __post_init__(self) -> None:
        for names, low, high in (
            (("epochs", "num_negatives", "batch_sequences", "groups_per_tile"), 1, math.inf),
            (("backward_negatives", "weight_decay", "mutual_information_weight"), 0, math.inf),
            (("user_norm_weight", "start_noise"), 0, math.inf),
            (("head_rate", "gate_rate"), 0, 100),
            (("warmup_fraction", "final_rate_fraction"), 0, 1),
            ([f"dropouts.{field.name}" for field in fields(Dropouts)], 0, 0.95),
        ):
            for name in names:
                value = attrgetter(name)(self)
                if not low <= value <= high:
                    bounds = f"at least {low:g}" + (f", at most {high:g}" if high != math.inf else "")
                    raise ValueError(f"{name}={value}; allowed: {bounds}")
        allowed = LOSSES if self.head.kind == "dot" else LOSSES[:-1]
        if self.loss not in allowed:
            raise ValueError(f"loss={self.loss!r}; allowed with a {self.head.kind} head: {', '.join(allowed)}")
        if not 0 < self.learning_rate <= 1:
            raise ValueError(f"learning_rate={self.learning_rate}; allowed: above 0, at most 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}; allowed: 0 to 2^63 - 1")

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def preset(name: str, *, epochs: int | None = None, seed: int = 0) -> TrainConfig:
    """Return a named configuration. Raises: ValueError naming the known names."""
    if name not in PRESETS:
        raise ValueError(f"preset={name!r}; allowed: {', '.join(PRESETS)}")
    config = PRESETS[name]
    return replace(config, seed=seed, epochs=config.epochs if epochs is None else epochs)


def default_epochs(config: TrainConfig, positions_per_epoch: int) -> int:
    """Return the preset's epochs, or up to ten times as many for small data."""
    wanted = -(-config.default_min_positions // max(1, positions_per_epoch))
    return min(max(config.epochs, wanted), 10 * config.epochs)


def with_dot_head(config: TrainConfig) -> TrainConfig:
    """Return the same training with the cosine baseline head, without a user-id component."""
    return replace(
        config,
        encoder=replace(config.encoder, uses_user_index=False, output_norm="length"),
        head=HeadShape(
            kind="dot",
            num_query_components=1,
            num_item_components=1,
            component_width=config.encoder.width,
            tau=config.head.tau,
        ),
        dropouts=Dropouts(encoder=config.dropouts.encoder),
        weight_decay=config.weight_decay if config.dot_weight_decay is None else config.dot_weight_decay,
        dot_weight_decay=None,
        user_norm_weight=0.0,
    )


def with_wide_dot_head(config: TrainConfig) -> TrainConfig:
    """Return the same training with a dot product that has the mixture's networks and bytes per item state."""
    mixture, narrow = config.head, with_dot_head(config)
    width = mixture.num_item_components * mixture.component_width + mixture.num_pairs
    head = replace(
        narrow.head, component_width=width, query_hidden=mixture.query_hidden, item_hidden=mixture.item_hidden
    )
    return replace(narrow, head=head)


def with_sasrec(config: TrainConfig) -> TrainConfig:
    """Return the same training with SASRec, with the authors' depth, heads and weight decay if known."""
    encoder = replace(config.encoder, kind="sasrec", num_time_buckets=0)
    theirs = config.sasrec
    if theirs is None:
        return replace(config, encoder=encoder)
    d_head = encoder.width // theirs.num_heads
    encoder = replace(
        encoder,
        num_blocks=theirs.num_blocks,
        num_heads=theirs.num_heads,
        d_qk=d_head,
        d_v=d_head,
        norm_epsilon=1e-8,
        residual_of_norm=True,
    )
    return replace(
        config, encoder=encoder, weight_decay=theirs.weight_decay, sasrec=None, dot_weight_decay=theirs.weight_decay
    )


_QUICK = TrainConfig(
    encoder=EncoderShape(
        kind="hstu", num_blocks=2, num_heads=2, width=50, d_qk=25, d_v=25, max_history=100, num_time_buckets=64
    ),
    head=HeadShape(
        kind="mol",
        num_query_components=4,
        num_item_components=2,
        component_width=50,
        tau=0.05,
        gate_hidden=64,
        query_hidden=0,
        item_hidden=0,
    ),
    epochs=6,
    dropouts=Dropouts(encoder=0.1),
    num_negatives=256,
    backward_negatives=32,
    batch_sequences=32,
    learning_rate=3e-3,
    loss="corrected-softmax",
    warmup_fraction=0.05,
    final_rate_fraction=0.02,
    default_min_positions=1_000_000,
    absence=AbsenceShape(),
)

# The authors' configuration. tests/golden checks every value; docs/decisions/024 lists the differences.
_ML_1M = TrainConfig(
    encoder=EncoderShape(
        kind="hstu",
        num_blocks=8,
        num_heads=2,
        width=50,
        d_qk=25,
        d_v=25,
        max_history=200,
        num_time_buckets=128,
        uses_user_index=True,
        norm_epsilon=1e-6,
        output_norm="layer",
    ),
    head=HeadShape(
        kind="mol",
        num_query_components=8,
        num_item_components=4,
        component_width=64,
        tau=0.05,
        gate_hidden=128,
        query_hidden=512,
    ),
    epochs=101,
    dropouts=Dropouts(encoder=0.2, item=0.1, user=0.5, gate=0.2),
    num_negatives=128,
    batch_sequences=128,
    learning_rate=1e-3,
    user_norm_weight=0.1,
    sasrec=SasRecSettings(num_blocks=2, num_heads=1),
)

_ML_20M = replace(
    _ML_1M,
    encoder=replace(_ML_1M.encoder, num_blocks=16, num_heads=8, width=256, d_qk=32, d_v=32),
    head=replace(_ML_1M.head, component_width=128),
    epochs=151,
    dropouts=replace(_ML_1M.dropouts, user=0.8, pair=0.1),
    sasrec=SasRecSettings(num_blocks=4, num_heads=4),
    dot_weight_decay=0.0,
)

_BOOKS = replace(
    _ML_1M,
    encoder=replace(
        _ML_1M.encoder,
        num_blocks=16,
        num_heads=8,
        width=64,
        d_qk=8,
        d_v=8,
        max_history=52,
        uses_user_index=False,
    ),
    head=replace(_ML_1M.head, num_item_components=8, component_width=32, query_activation="gelu"),
    epochs=201,
    dropouts=replace(_ML_1M.dropouts, encoder=0.5, user=0.0),
    num_negatives=512,
    user_norm_weight=0.0,
    sasrec=SasRecSettings(num_blocks=4, num_heads=4),
    dot_weight_decay=0.0,
)

PRESETS = {"quick": _QUICK, "ml-1m": _ML_1M, "ml-20m": _ML_20M, "books": _BOOKS}
