"""What a loop's clock says while the loop works, fails, and hangs."""

from services.platform.stream.follower import TurnClock


def test_a_failing_loop_grows_old_and_is_not_stuck_and_a_hanging_one_is_both() -> None:
    now_s = [100.0]
    turns = TurnClock(stuck_s=60.0, clock=lambda: now_s[0])
    for _ in range(5):
        now_s[0] += 30
        turns.ended(well=False)
    assert (turns.age_s, turns.is_stuck) == (150.0, False)
    turns.ended(well=True)
    assert (turns.age_s, turns.is_stuck) == (0.0, False)
    now_s[0] += 61
    assert (turns.age_s, turns.is_stuck) == (61.0, True)
    turns.ended(well=False)
    assert (turns.age_s, turns.is_stuck) == (61.0, False)
