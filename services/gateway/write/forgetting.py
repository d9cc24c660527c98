"""What is held of a user, and what a forget did about it: what ForgetUser answers. Plain values, no Protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredUser:
    """What the encoder process and the state store hold. forgotten_up_to: partition of `interactions` -> offset, as
    applied there; empty: never. in_model: training gave the user a component of its own."""

    pseudonym: str
    history_events: int = 0
    seen_items: int = 0
    query_states: int = 0
    in_model: bool = False
    forgotten_up_to: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """What one refresher holds of a user. partitions: those of `attributions` that it speaks for."""

    summed_interactions: int = 0
    remembered_interactions: int = 0
    forgotten_up_to: Mapping[int, int]
    partitions: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReport:
    """found, left: kind of thing -> how many are held, before and now; a kind that nobody could count is left out.
    is_applied: every process has it. remains: what stays and until when, in sentences."""

    forget_id: str
    found: Mapping[str, int]
    left: Mapping[str, int]
    is_applied: bool
    remains: Sequence[str]
