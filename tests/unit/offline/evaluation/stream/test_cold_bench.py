"""Popular items for cold people: counts and favours as a loop has them, and a page that says what was measured."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stream_scene import ordered_events, untrained

from services.offline.evaluation.cold.rows import FAVOURED, HALF_LIFE_S, MODEL, NOW, ColdRanker, events_before, run
from services.offline.evaluation.common.report import Request
from services.offline.evaluation.stream.models import TrainedModels, stream_model
from services.offline.evaluation.stream.walk import EventBatch, stream_setting, walk


def test_every_event_is_scored_by_what_was_taken_before_it() -> None:
    setting = stream_setting(ordered_events(), seed=0, withheld_share=0)
    events, split = setting.interactions, setting.split
    model = stream_model(setting, untrained, seed=0)
    ranker = ColdRanker(setting, TrainedModels(setting, [model], name=MODEL), tau=model.tau)
    looked = 0

    class Checked:
        def step(self, batch: EventBatch) -> dict[str, np.ndarray]:
            nonlocal looked
            found = ranker.step(batch)
            for row, place in enumerate(batch.places[batch.chosen].tolist()):
                at = events.timestamps[split + place]
                now = 0.03 * np.bincount(events.items[:split], minlength=events.num_items).astype(float)
                for past in range(split, split + place):
                    weight = max(0.0, 0.5 * (float(events.values[past]) - 3))
                    now[events.items[past]] += weight * 0.5 ** ((at - events.timestamps[past]) / HALF_LIFE_S)
                assert found[NOW][row][now > 0] == pytest.approx(now[now > 0])
                taken = [item for item in range(events.num_items) if now[item] > 0]
                for item in taken:
                    favour = 2 * 0.05 * math.log(now[item] / min(now[one] for one in taken))
                    assert found[FAVOURED][row, item] == pytest.approx(found[MODEL][row, item] + favour)
                looked += 1
            return dict(found)

    walk(setting, [Checked()], batch_events=7)
    assert looked == setting.num_streamed
    seen = [int((events.users[:row] == events.users[row]).sum()) for row in range(split, len(events))]
    assert events_before(setting).tolist() == seen


def test_the_page_has_a_row_for_each_group_and_data_without_times_is_refused(tmp_path: Path) -> None:
    request = Request(how="freshet bench cold", out=tmp_path, quick=False, seed=0)
    data = ordered_events(num_users=60, events=1000)
    report = run(request, fit=untrained, seeds=[0, 1], predict_every=1, datasets=[data])
    assert sum(row["events"] for row in report["rows"]) == 200
    assert "| orders | 20–29 | " in (tmp_path / "cold.md").read_text(encoding="utf-8")
    without = replace(data, has_times=False)
    with pytest.raises(ValueError, match="orders has no times"):
        run(request, fit=untrained, seeds=[0], predict_every=1, datasets=[without])
