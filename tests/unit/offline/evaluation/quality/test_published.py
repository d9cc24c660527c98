"""The published protocol is what the page says, and what knows the future is out of reach of what is served."""

import ast
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from services.offline.datasets import leave_one_out_split
from services.offline.evaluation.quality import published
from services.offline.evaluation.quality.published import PROTOCOLS, Protocol, PublishedModel, with_next_times
from services.offline.training.loop import train
from services.offline.training.sequences import Histories, windows_before
from tests.unit.offline.training.training_scene import CONFIG, cyclic_interactions

SERVICES = Path(published.__file__).parents[3]
NUM_ITEMS = 30
NEXT = Protocol(title="next", knows_next_time=True)
POSITIONS = Protocol(title="positions", has_positions=True)


def model(protocol: Protocol) -> PublishedModel:
    torch.manual_seed(0)
    return PublishedModel(
        CONFIG.encoder, CONFIG.head, num_items=NUM_ITEMS, protocol=protocol, dropouts=CONFIG.dropouts
    ).eval()


def test_timestamps_hold_the_own_time_and_the_seconds_until_the_next_event() -> None:
    plain = cyclic_interactions(num_users=6, events=90)
    # Several events of a user in one second, of users in turn.
    plain = replace(plain, timestamps=np.sort(plain.timestamps // 100_000 * 100_000))
    packed = with_next_times(plain)
    found, expected = Histories.of(packed), Histories.of(plain)
    assert found.items.tolist() == expected.items.tolist()
    assert (found.times >> 32).tolist() == expected.times.tolist()
    for user in range(6):
        start, end = expected.offsets[user : user + 2]
        assert (found.times & 0xFFFFFFFF)[start:end].tolist() == [*np.diff(expected.times[start:end]), 0]
    held_out = [one.items[leave_one_out_split(one).test_rows] for one in (plain, packed)]
    assert sorted(held_out[0].tolist()) == sorted(held_out[1].tolist())


def test_a_bias_is_of_the_time_from_an_event_to_the_one_that_is_predicted() -> None:
    histories = Histories.of(with_next_times(cyclic_interactions(num_users=6, events=90)))
    events = histories.offsets[1:] - 1
    windows = windows_before(histories, events, np.arange(6), 16)
    buckets = model(NEXT).encoder.buckets(torch.from_numpy(windows.times))
    own = histories.times >> 32
    for row, (event, length) in enumerate(zip(events, windows.lengths, strict=True)):
        first = event - length
        for i in range(length):
            for j in range(i + 1):
                seconds = max(1, int(own[first + i + 1] - own[first + j]))
                assert buckets[row, i, j] == min(int(np.log(seconds) / 0.301), 31)


def test_the_time_of_the_predicted_event_moves_the_state_before_it_and_ours_it_does_not() -> None:
    items = torch.arange(5).unsqueeze(0)
    times = torch.arange(5).unsqueeze(0) * 50
    later = times.clone()
    later[0, -1] += 5_000_000
    assert torch.equal(model(Protocol(title="ours")).encode(items, times), model(PROTOCOLS[1]).encode(items, times))
    packed, longer = (times << 32) | 50, (times << 32) | torch.tensor([50, 50, 50, 50, 9_000_000])
    with torch.no_grad():
        known, other = (model(NEXT).encode(items, one) for one in (packed, longer))
        plain = model(POSITIONS).encode(items, times)
    assert torch.equal(known[0, :4], other[0, :4])
    assert not torch.equal(known[0, 4], other[0, 4])
    # The same item in two positions.
    with torch.no_grad():
        shifted = model(POSITIONS).encode(torch.tensor([[0, 0]]), torch.zeros(1, 2, dtype=torch.int64))
        without = model(NEXT).encode(torch.tensor([[0, 0]]), torch.zeros(1, 2, dtype=torch.int64))
    assert plain.shape == known.shape
    assert (shifted[0, 0] - shifted[0, 1]).abs().max() > 2 * (without[0, 0] - without[0, 1]).abs().max()


def test_a_published_model_is_trained_and_films_of_long_ago_compete(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each user has had 20 of 30 films, so that what is left out matters.
    split = leave_one_out_split(with_next_times(cyclic_interactions(num_users=10, num_items=NUM_ITEMS, events=200)))
    trained = train(CONFIG, split.train, build=partial(PublishedModel, protocol=PROTOCOLS[-1])).model
    assert isinstance(trained, PublishedModel)

    def ranked(recent: int) -> dict:
        monkeypatch.setattr(published, "_RECENT", recent)
        return published.ranked(published.ModelScorer(trained), split.interactions, split.test_rows)

    found = ranked(200)
    assert found["seen"]["hr@10"] == found["recent"] > found["none"]
    assert ranked(0) == found | {"recent": found["none"]}
    assert found["none"] <= ranked(5)["recent"] <= found["recent"]


def test_rows_are_differences_to_ours_of_the_epochs_that_validation_and_test_choose() -> None:
    def epoch(validation: float, test: float) -> dict:
        return {
            "validation": {"seen": {"ndcg@10": validation}},
            "test": {"seen": {"hr@10": test, "ndcg@10": test / 2}, "recent": test - 0.01, "none": test - 0.1},
        }

    runs = [
        {"arm": "hstu-dot", "protocol": protocol, "epochs": [epoch(0.1, 0.3 + more), epoch(0.2, 0.2 + more)]}
        for protocol, more in (("ours", 0.0), ("ours", 0.1), ("every film", 0.05))
    ]
    ours, films = published._rows(runs)
    assert (ours["seeds"], films["seeds"], ours["more"], films["hr@10_sd"]) == (2, 1, None, None)
    assert [ours["hr@10"], ours["recent"], ours["by_test"]] == pytest.approx([0.25, 0.24, 0.34])
    assert films["more"] == pytest.approx(0.05)


def test_nothing_but_the_benchmark_names_a_model_that_knows_the_future() -> None:
    names = {"quality.published", "PublishedModel", "with_next_times", "_PublishedEncoder"}
    users = {
        str(path.relative_to(SERVICES))
        for path in SERVICES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and any(one.name == "published" for one in node.names))
        or (isinstance(node, ast.ImportFrom) and str(node.module).endswith("quality.published"))
        or (isinstance(node, ast.Name) and node.id in names)
    }
    assert users == {"cli/commands/bench.py", "offline/evaluation/quality/published.py"}
