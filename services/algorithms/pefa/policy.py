"""The weight of feedback, and its share in an item's state.

`FeedbackPolicy` weighs interactions; `SharePolicy` gives lambda, the model's share (1 = model only). Both have a text
form for settings and benchmarks.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from services.algorithms.pefa.contribution import MAX_WEIGHT

Floats = npt.NDArray[np.float64]

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_SETTINGS = {"evidence": ("prior", "least"), "fixed": ("least",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeWeight:
    """A type's weight: slope * (value - centre), or slope without a centre; clipped to +-limit.

    "rating:0.5@3" is 0.5 * (stars - 3): five stars weigh 1, one star -1.
    """

    slope: float = 1.0
    centre: float | None = None
    limit: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slope) and (self.centre is None or math.isfinite(self.centre))):
            raise ValueError(f"slope={self.slope}, centre={self.centre}; allowed: finite numbers")
        if not 0 < self.limit <= MAX_WEIGHT:
            raise ValueError(f"limit={self.limit} allowed: more than 0, at most {MAX_WEIGHT}")


@dataclass(frozen=True, slots=True)
class FeedbackPolicy:
    """An interaction's weight by type and value; `other` is for unnamed types."""

    types: Mapping[str, TypeWeight] = field(default_factory=lambda: MappingProxyType({}))
    other: TypeWeight = TypeWeight()

    def weight(self, interaction_type: str, value: float) -> float:
        """One interaction's weight; sums omit interactions of weight 0. Raises: ValueError for NaN."""
        if math.isnan(value):
            raise ValueError("value=nan allowed: a number")
        rule = self.types.get(interaction_type, self.other)
        raw = rule.slope if rule.centre is None else rule.slope * (value - rule.centre)
        return min(max(raw, -rule.limit), rule.limit)

    def weights(self, types: Sequence[str], values: Sequence[float] | npt.NDArray[np.floating]) -> Floats:
        return np.array([self.weight(kind, float(value)) for kind, value in zip(types, values, strict=True)])

    @property
    def text(self) -> str:
        """The policy in one line: type, slope, @centre, <limit."""
        parts = [*sorted(self.types.items()), ("*", self.other)]
        return ",".join(f"{name}:{_rule_text(rule)}" for name, rule in parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharePolicy:
    """lambda from an item's evidence.

    "evidence": lambda = least + (1 - least) prior / (prior + m), with m = evidence * coherence: the posterior mean
    direction under a von Mises-Fisher prior around the model's, with concentration `prior` in units of weight. m is the
    length of the sum, so feedback that nearly cancels has little effect. "fixed": lambda = least, the paper's constant.
    """

    kind: Literal["evidence", "fixed"] = "evidence"
    least: float = 0.0
    prior: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= 1:  # NaN too
            raise ValueError(f"least={self.least} allowed: 0 to 1")
        if not self.prior > 0 or math.isinf(self.prior):
            raise ValueError(f"prior={self.prior} allowed: more than 0")

    def model_share(self, evidence: npt.ArrayLike, coherence: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """lambda in [0, 1], elementwise; 1 if there is no evidence, or if it cancels.

        Raises: ValueError with the argument that has NaN or negative values.
        """
        evidence, coherence = np.asarray(evidence, dtype=np.float64), np.asarray(coherence, dtype=np.float64)
        for name, values in (("evidence", evidence), ("coherence", coherence)):
            if np.isnan(values).any() or (values < 0).any():
                raise ValueError(f"{name} holds NaN or negative values; allowed: at least 0")
        if self.kind == "fixed":
            strength = np.where((evidence > 0) & (coherence > 0), 1.0, 0.0)
        else:
            net = evidence * np.minimum(coherence, 1.0)
            strength = net / (self.prior + net)
        return np.asarray(1.0 - (1.0 - self.least) * strength)

    @property
    def text(self) -> str:
        """The text that `parse` reads: "evidence(prior=10,least=0)"."""
        if self == FROZEN:
            return "frozen"
        if self.kind == "fixed":
            return f"fixed(least={self.least:.17g})"
        return f"evidence(prior={self.prior:.17g},least={self.least:.17g})"

    @classmethod
    def parse(cls, text: str) -> "SharePolicy":
        """Read a policy's text, or a name of `NAMED_SHARES`. Raises: ValueError with the text and what is allowed."""
        if text in NAMED_SHARES:
            return NAMED_SHARES[text]
        match = re.fullmatch(r"(evidence|fixed)\(([^()]*)\)", text.replace(" ", ""))
        allowed = f"allowed: {', '.join(NAMED_SHARES)}, evidence(prior=10,least=0) or fixed(least=0.5)"
        if match is None:
            raise ValueError(f"share={text!r}; {allowed}")
        values: dict[str, float] = {}
        for part in filter(None, match[2].split(",")):
            setting = re.fullmatch(rf"(\w+)=({_NUMBER})", part)
            if setting is None or setting[1] not in _SETTINGS[match[1]]:
                raise ValueError(f"share={text!r}: {part!r}; {allowed}")
            values[setting[1]] = float(setting[2])
        kind: Literal["evidence", "fixed"] = "fixed" if match[1] == "fixed" else "evidence"
        if kind == "fixed" and "least" not in values:
            raise ValueError(f"share={text!r} without least; {allowed}")
        return cls(kind=kind, **values)


FROZEN = SharePolicy(kind="fixed", least=1.0)
"""The model alone."""
PAPER = SharePolicy(kind="fixed", least=0.5)
"""Equation 8 with the paper's usually best lambda (its Table 4)."""
DEFAULT_SHARE = SharePolicy(prior=3.0, least=0.9)
"""For items in the bundle, whose states predict better than the states of their users.

HR@10 and MRR of an 8x4x64 model of MovieLens-1M on 3,987 queries of other users: frozen .1710 and .0771; this .1737 and
.0779; the paper's lambda (.5) .1540 and .0715; prior 10, least 0 .1542 and .0702. A weak model gains from a lower
least.
"""
NEW_ITEM_SHARE = SharePolicy(prior=0.2, least=0.5)
"""For items without a bundle state, which become at most half as long as a trained item.

Full-length states would be in every answer, because query states are closer to each other than to their items. With a
tenth of the items hidden (model and queries as above), HR@50 of hidden items from their 3rd interaction on and MRR of
all items: without states .000 and .0730, lambda 0 .739 and .0305, this .370 and .0731, trained states .423 and .0773,
popularity .129. share_choice.new_item_share_from_sums finds the best length, which depends on the model (.8 to .9 at
4x2x32); this default is safe for all.
"""
NAMED_SHARES: Mapping[str, SharePolicy] = MappingProxyType(
    {"frozen": FROZEN, "paper": PAPER, "default": DEFAULT_SHARE, "new_item": NEW_ITEM_SHARE}
)


def _rule_text(rule: TypeWeight) -> str:
    centre = "" if rule.centre is None else f"@{rule.centre:.17g}"
    return f"{rule.slope:.17g}{centre}<{rule.limit:.17g}"
