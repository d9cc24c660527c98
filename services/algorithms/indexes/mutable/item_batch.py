"""Items on their way into a mutable index: ids, states and categories, checked before anything changes.

Every refusal names the item and the value, since one bad row of a batch refuses the whole batch. Zero components are
legal, as in every other index: a part that an item lacks, and where all of them are zero an item that scores 0.

Letters: n items of the batch, P_q, P_x query and item components, P = P_q * P_x, d component width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.algorithms.ops.mol_scores.shapes import check_items
from services.algorithms.states import ItemStates, PairGate

MAX_ID_BYTES = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemBatch:
    """n items with distinct ids.

    `categories`: one list per item; None keeps what an item has (none, for a new one), as a stream of refreshed
    states carries no categories.
    """

    item_ids: Sequence[str]
    states: ItemStates
    categories: Sequence[Sequence[str]] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for ids that repeat or are not 1-128 bytes of UTF-8, and for columns of unequal length."""
        check_ids("item_ids", self.item_ids)
        if len(self.item_ids) != len(self.states):
            raise ValueError(f"{len(self.item_ids)} item ids but states of {len(self.states)} items")
        if self.categories is not None and len(self.categories) != len(self.item_ids):
            raise ValueError(f"{len(self.item_ids)} item ids but categories of {len(self.categories)} items")

    def __len__(self) -> int:
        return len(self.item_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemShape:
    """What every item of one model looks like: P_x, d, P, and whether items bring a gate of their own."""

    num_components: int
    width: int
    num_pairs: int
    gated: bool

    @property
    def num_query_components(self) -> int:
        return self.num_pairs // self.num_components

    @property
    def bytes_per_item(self) -> int:
        """Bytes of one item's float32 states."""
        return 4 * (self.num_components * self.width + (self.num_pairs if self.gated else 0))

    def check(self, states: ItemStates) -> None:
        """Raise ValueError, naming both values, unless these states fit the index."""
        _, num_components, width = states.components.shape
        if (num_components, width) != (self.num_components, self.width):
            raise ValueError(
                f"items have {num_components} components of width {width}; "
                f"the index holds {self.num_components} of width {self.width}"
            )
        if (states.gate is not None) != self.gated:
            raise ValueError(
                f"items.gate is {'present' if states.gate is not None else 'absent'} but the index's items have "
                f"{'one' if self.gated else 'none'}"
            )
        if states.gate is not None and states.gate.shape[1] != self.num_pairs:
            raise ValueError(f"items.gate has {states.gate.shape[1]} pairs; the index holds {self.num_pairs}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What one batch did: the version that shows it, how many items it touched, and removed ids that were not there."""

    version: str
    added: int = 0
    updated: int = 0
    removed: int = 0
    unknown: tuple[str, ...] = field(default=())


def shape_of(states: ItemStates, pair_gate: PairGate | None) -> ItemShape:
    """The shape that states and pair gate imply, zero items included. Raises ValueError if they disagree."""
    num_pairs = check_items(states, pair_gate)
    _, num_components, width = states.components.shape
    return ItemShape(num_components=num_components, width=width, num_pairs=num_pairs, gated=states.gate is not None)


def check_ids(name: str, item_ids: Sequence[str]) -> None:
    """Raise ValueError, naming the id, unless all are distinct and 1-128 bytes of UTF-8."""
    for item_id in item_ids:
        try:
            size = len(item_id) if item_id.isascii() else len(item_id.encode())
        except UnicodeEncodeError as exc:
            raise ValueError(f"{name} holds {item_id!r}, which is not UTF-8") from exc
        if not 1 <= size <= MAX_ID_BYTES:
            raise ValueError(f"{name} holds {item_id!r} of {size} bytes; allowed: 1-{MAX_ID_BYTES}")
    if len(set(item_ids)) != len(item_ids):
        seen: set[str] = set()
        repeated = next(item_id for item_id in item_ids if item_id in seen or seen.add(item_id))  # type: ignore[func-returns-value]
        raise ValueError(f"{name} holds {repeated!r} more than once; a batch names each item once")
