"""The arms of the comparison: which encoder with which head, and the settings that each arm may choose from.

Six arms, as in the paper's Table 3 (arXiv:2407.15462) with two controls: a dot product at the mixture's bytes per item,
and a mixture without its mutual-information loss. Every arm has equally many trials. It trains and measures nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.offline.training.presets import TrainConfig, with_dot_head, with_sasrec, with_wide_dot_head

NUM_TRIALS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One setting: what an arm may choose. `regularised` drops more: encoder .3, item .2.

    `component_width` is a mixture's; None keeps the preset's.
    """

    loss: str
    num_negatives: int = 64
    regularised: bool = False
    component_width: int | None = None

    @property
    def text(self) -> str:
        """For a table."""
        parts = [self.loss if self.loss == "full-softmax" else f"{self.loss}, {self.num_negatives} negatives"]
        parts += ["more dropout"] if self.regularised else []
        parts += [f"components {self.component_width} wide"] if self.component_width else []
        return ", ".join(parts)

    def applied(self, config: TrainConfig) -> TrainConfig:
        """The configuration with this trial's settings."""
        dropouts = replace(config.dropouts, encoder=0.3, item=0.2) if self.regularised else config.dropouts
        head = replace(config.head, component_width=self.component_width or config.head.component_width)
        return replace(config, loss=self.loss, num_negatives=self.num_negatives, dropouts=dropouts, head=head)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """`shaped` turns a preset's configuration, HSTU with the mixture, into this arm's."""

    name: str
    title: str
    shaped: Callable[[TrainConfig], TrainConfig]
    trials: Sequence[Trial]

    @property
    def is_mixture(self) -> bool:
        return self.name.endswith(("mol", "no-mi"))


# The paper's loss first, then what was seen to matter: the log-Q correction, the full softmax (which would cost a
# mixture X / K times its sampled one), gBCE, more dropout, and for a mixture the width of its components.
_DOT_TRIALS = (
    Trial(loss="sampled-softmax"),
    Trial(loss="corrected-softmax", num_negatives=256),
    Trial(loss="full-softmax"),
    Trial(loss="full-softmax", regularised=True),
    Trial(loss="gbce", num_negatives=256),
)
_MIXTURE_TRIALS = (
    Trial(loss="sampled-softmax"),
    Trial(loss="corrected-softmax"),
    Trial(loss="corrected-softmax", component_width=32),
    Trial(loss="corrected-softmax", regularised=True),
    Trial(loss="gbce"),
)
assert len(_DOT_TRIALS) == len(_MIXTURE_TRIALS) == NUM_TRIALS


def _without_mutual_information(config: TrainConfig) -> TrainConfig:
    return replace(config, mutual_information_weight=0.0)


ARMS: Mapping[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(
            name="sasrec-dot",
            title="SASRec, dot product",
            shaped=lambda config: with_dot_head(with_sasrec(config)),
            trials=_DOT_TRIALS,
        ),
        Arm(name="hstu-dot", title="HSTU, dot product", shaped=with_dot_head, trials=_DOT_TRIALS),
        Arm(
            name="hstu-dot-wide",
            title="HSTU, dot product at the mixture's bytes per item",
            shaped=with_wide_dot_head,
            trials=_DOT_TRIALS,
        ),
        Arm(name="sasrec-mol", title="SASRec, mixture", shaped=with_sasrec, trials=_MIXTURE_TRIALS),
        Arm(name="hstu-mol", title="HSTU, mixture", shaped=lambda config: config, trials=_MIXTURE_TRIALS),
        Arm(
            name="hstu-mol-no-mi",
            title="HSTU, mixture without mutual information",
            shaped=_without_mutual_information,
            trials=_MIXTURE_TRIALS,
        ),
    )
}


def bytes_per_item(config: TrainConfig) -> int:
    """What an item's state takes in float32: its components and, of a mixture, its gate."""
    head = config.head
    floats = head.num_item_components * head.component_width + (head.num_pairs if head.is_mixture else 0)
    return 4 * floats
