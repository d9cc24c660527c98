"""What a reader of `attributions` keeps: each position once, without what is undone or forgotten."""

from collections.abc import Sequence

from freshet.v1 import events_pb2


def standing(messages: Sequence[events_pb2.Attribution]) -> dict[tuple[int, int], bytes]:
    """Components of the query state by position in `interactions`. Raises: AssertionError where a position has two."""
    undone = {(m.undoes.partition, m.undoes.offset) for m in messages if m.HasField("undoes")}
    void = {
        (m.user_pseudonym, up_to.partition): up_to.offset
        for m in messages
        if m.HasField("forgets")
        for up_to in m.forgets.up_to
    }
    found: dict[tuple[int, int], bytes] = {}
    for m in messages:
        at = (m.source.partition, m.source.offset)
        if m.HasField("query_state") and at not in undone and at[1] > void.get((m.user_pseudonym, at[0]), -1):
            assert found.setdefault(at, m.query_state.components) == m.query_state.components
    return found
