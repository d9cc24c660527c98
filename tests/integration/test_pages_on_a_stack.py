"""Pages on the whole stack: a thousand people, five pages each, while the index changes; and altered tokens."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from freshet.v1 import events_pb2, gateway_pb2
from outside import Outside, event, until

from services.stack import Stack

pytestmark = pytest.mark.integration

PEOPLE, PAGES, K = 1_000, 5, 10
DEPTH = PAGES * K


def recommend(outside: Outside, user: str, k: int, **fields: object) -> gateway_pb2.RecommendResponse:
    return outside.gateway.Recommend(gateway_pb2.RecommendRequest(user_id=user, k=k, **fields), timeout=10)


def first_page(outside: Outside, user: str) -> gateway_pb2.RecommendResponse:
    """Asked again where the machine was too busy: such an answer's list is not kept."""

    def look() -> gateway_pb2.RecommendResponse | None:
        answer = recommend(outside, user, K, page_depth=DEPTH)
        return answer if answer.next_page_token else None

    return until("a list is kept", look)


def ids(answer: gateway_pb2.RecommendResponse) -> list[str]:
    return [item.item_id for item in answer.items]


def test_pages_are_the_pinned_list_while_the_index_changes(stack: Stack) -> None:
    stack.up()
    run = uuid.uuid4().hex[:8]
    people = [f"reader-{run}-{number}" for number in range(PEOPLE)]
    with Outside(stack) as outside, ThreadPoolExecutor(8) as pool:
        known = people
        for start in range(0, len(known), 250):
            outside.record(
                *(event(user, outside.items[(start + n) % 300]) for n, user in enumerate(known[start : start + 250]))
            )
        until("the last one is known", lambda: recommend(outside, known[-1], 1).state_source == "stored")
        firsts = list(pool.map(lambda user: first_page(outside, user), people))
        # The whole rest of each list at once, while nothing has changed yet.
        pinned = [
            ids(first)
            + ids(recommend(outside, user, DEPTH - K, page_token=first.next_page_token))
            for user, first in zip(people, firsts, strict=True)
        ]  # fmt: skip
        assert all(len(one) == len(set(one)) == DEPTH for one in pinned)
        versions, stop = set[str](), threading.Event()

        def change() -> None:
            number = 0
            while not stop.is_set():
                items = [events_pb2.Item(item_id=f"page-{run}-{number}-{n}", title=f"{run} {number}") for n in range(5)]
                outside.gateway.PutItems(gateway_pb2.PutItemsRequest(items=items), timeout=10)
                taken = [event(f"crowd-{run}-{number}-{n}", item.item_id) for item in items for n in range(12)]
                outside.record(*taken, *(event(user, outside.items[number % 300]) for user in known[:20]))
                versions.add(recommend(outside, known[0], 1).index_version)
                number += 1
                stop.wait(0.1)

        writer = threading.Thread(target=change)
        writer.start()
        try:

            def walk(row: int) -> list[str]:
                found, token = ids(firsts[row]), firsts[row].next_page_token
                while token:
                    page = recommend(outside, people[row], K, page_token=token)
                    assert page.index_version == firsts[row].index_version
                    found, token = found + ids(page), page.next_page_token
                return found

            walked = list(pool.map(walk, range(PEOPLE)))
            until("the index has changed", lambda: len(versions) > 1, within_s=60)
        finally:
            stop.set()
            writer.join()
        assert walked == pinned
        for user, first in zip(people[::100], firsts[::100], strict=True):
            token = first.next_page_token
            for forged, code in (
                (token[:-1] + ("A" if token[-1] != "A" else "B"), grpc.StatusCode.INVALID_ARGUMENT),
                (first.exposure_id, grpc.StatusCode.INVALID_ARGUMENT),
                (firsts[1].next_page_token, grpc.StatusCode.PERMISSION_DENIED),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    recommend(outside, user, K, page_token=forged)
                assert refused.value.code() is code
                assert refused.value.details().startswith("page_token")


def test_what_was_answered_does_not_come_again_where_it_is_said(stack: Stack) -> None:
    stack.up()
    asked = gateway_pb2.NotAgain(answers=3)
    with Outside(stack) as outside:

        def shown() -> tuple[str, list[str], list[list[str]]] | None:
            """A user's best, and their answers, of one version of the index."""
            user = outside.new_user()
            # Enough for what is popular, which changes, to say nothing of them.
            outside.live(user, *outside.items[:12])
            whole = recommend(outside, user, 4 * K)
            answers = [ids(recommend(outside, user, K, not_again=asked)) for _ in range(4)]
            is_one = whole.index_version == recommend(outside, user, 1).index_version
            return (user, ids(whole), answers) if is_one else None

        user, whole, answers = until("one version answers", shown)
        assert [item_id for answer in answers for item_id in answer] == whole
        assert not set(ids(recommend(outside, user, K, not_again=asked))) & set(whole[K:])
