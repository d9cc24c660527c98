"""The simulated world of the gate's benchmark: what is spoilt in which model, and a page that says what was found."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from services.offline.datasets.simulator import simulate
from services.offline.evaluation.common.report import Request
from services.offline.evaluation.retraining.rows import (
    FIRST_EVENTS,
    LEARNT_DAYS,
    MODELS,
    WORLD,
    first_shuffled,
    run,
    shuffled,
)

SMALL = replace(WORLD, num_users=400, num_items=200, num_topics=10, mean_events_per_user=60.0)


def test_spoilt_labels_are_others_of_the_same_data() -> None:
    data, rng = simulate(SMALL), np.random.default_rng(0)
    spoilt = shuffled(data, rng)
    assert (np.sort(spoilt.items) == np.sort(data.items)).all()
    assert (spoilt.items != data.items).mean() > 0.9
    assert (spoilt.users == data.users).all()


def test_only_the_first_events_of_everybody_are_spoilt() -> None:
    data = simulate(SMALL)
    spoilt = first_shuffled(data, np.random.default_rng(0))
    seen: dict[int, int] = {}
    changed = 0
    for user, before, after in zip(data.users.tolist(), data.items.tolist(), spoilt.items.tolist(), strict=True):
        place = seen.get(user, 0)
        seen[user] = place + 1
        assert before == after or place < FIRST_EVENTS
        changed += before != after
    assert changed > 0.8 * sum(min(count, FIRST_EVENTS) for count in seen.values())


def test_new_people_come_in_the_days_that_are_judged() -> None:
    data = simulate(SMALL)
    begin = data.timestamps[0] + LEARNT_DAYS * 86_400
    old = set(data.users[data.timestamps < begin].tolist())
    week = data.users[(data.timestamps >= begin) & (data.timestamps < begin + 7 * 86_400)].tolist()
    assert len(set(week) - old) > 5


def test_every_model_is_judged_and_the_page_says_what_was_found(tmp_path: Path) -> None:
    request = Request(how="freshet bench retraining", out=tmp_path, quick=True, seed=0)
    report = run(request, seeds=1, world=SMALL, epochs=1)
    assert [row["model"] for row in report["rows"]] == list(MODELS)
    text = (tmp_path / "retraining.md").read_text(encoding="utf-8")
    assert all(f"| 0 | {name} | " in text for name in MODELS)
    assert "400 people, 200 items" in text
