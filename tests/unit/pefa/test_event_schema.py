"""events.yaml: what it says by default, what it may say, and what is refused."""

from pathlib import Path

import pytest

from services.algorithms.bundles.event_schema import MAX_BYTES, EventSchema, Role, SchemaError, default_schema
from services.algorithms.encoding.actions import Actions, action_name

MANY = ", ".join(f"t{number}: {{role: neutral}}" for number in range(257))


def parse(text: str) -> EventSchema:
    return EventSchema.parse(text.encode(), "events.yaml")


def test_by_default_what_was_shown_or_is_unknown_teaches_nothing() -> None:
    for kind in ("impression", "remove_from_cart", "never heard of"):
        one = default_schema().of(kind)
        assert not one.seen
        assert not one.history
        assert default_schema().feedback.weight(kind, 1.0) == 0
    assert not default_schema().of("impression").is_attributed
    assert default_schema().of("never heard of").is_attributed


def test_by_default_who_turned_an_item_down_is_not_taken_for_one_who_likes_it() -> None:
    for kind in ("dislike", "hide", "skip"):
        one = default_schema().of(kind)
        assert (one.role, one.seen, one.history, one.is_encoded) == (Role.NEGATIVE, True, True, False)
        assert default_schema().feedback.weight(kind, 1.0) == -1


def test_a_schema_says_what_its_types_mean() -> None:
    schema = parse(
        """
        types:
          buy: {role: positive, weight: 2}
          stars: {role: positive, weight: 0.25, centre: 2, limit: 0.5}
          boo: {role: negative, history: true, weight: -0.5}
          banner: {role: exposure, seen: true}
        default: {role: positive, seen: true}
        """
    )
    weight = schema.feedback.weight
    assert [weight("buy", 9), weight("stars", 3), weight("stars", 5), weight("boo", 1)] == [2, 0.25, 0.5, -0.5]
    assert (schema.of("boo").history, schema.of("banner").seen) == (True, True)
    assert (schema.of("anything").history, weight("anything", 1)) == (True, 1)
    assert parse("types: {}").of("anything").role is Role.NEUTRAL


def test_actions_are_types_and_levels_of_what_a_value_says() -> None:
    schema = parse(
        "types: {buy: {role: positive}, stars: {role: positive, weight: 0.25, centre: 3, limit: 0.5},"
        " hide: {role: negative}, seen: {role: exposure}, note: {role: neutral, seen: true, history: true}}"
    )
    said = [action_name(schema, "stars", value) for value in (-9, 1, 2, 3, 3.9, 4.1, 5, 9)]
    assert said == [f"stars {level}" for level in ("-2", "-2", "-1", "0", "+1", "+1", "+2", "+2")]
    assert [action_name(schema, kind, 7.0) for kind in ("buy", "hide", "unheard of")] == ["buy", "hide", ""]
    read = Actions(schema, ["hide", "stars +2"])
    assert [read.row("stars", value) for value in (5, 1)] == [2, 0]
    assert [read.row(kind, 1.0) for kind in ("hide", "buy", "note", "seen", "unheard of")] == [1, 0, 0, -1, -1]
    # Without a row of its own a hide would read as taken.
    assert Actions(schema, ["buy"]).row("hide", 1.0) == -1
    assert [schema.speaks_for("stars", value) for value in (3, 3.1)] == [False, True]
    assert [schema.speaks_for(kind, 0.0) for kind in ("buy", "hide", "note", "seen")] == [True, False, False, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "NoneType; allowed: types"),
        ("[1]", "list; allowed: types"),
        ("types: [a]", "allowed: types, a mapping of names, and default"),
        ("types: {}\nrules: {}", "holds ['rules', 'types']; allowed: types"),
        ("types: {a: {role: lukewarm}}", "a.role='lukewarm'; allowed: positive, negative, exposure, neutral"),
        ("types: {a: {}}", "a.role=None; allowed: positive"),
        ("types: {a: positive}", "a is 'positive'; allowed: a mapping with role"),
        ("types: {a: {role: positive, weight: .nan}}", "a.weight=nan; allowed: a finite number"),
        ("types: {a: {role: positive, weight: .inf}}", "a.weight=inf; allowed: a finite number"),
        ("types: {a: {role: positive, weight: heavy}}", "a.weight='heavy'; allowed: a finite number"),
        ("types: {a: {role: positive, weight: true}}", "a.weight=True; allowed: a finite number"),
        ("types: {a: {role: positive, seen: 1}}", "a.seen=1; allowed: true or false"),
        ("types: {a: {role: positive, colour: red}}", "a.colour; allowed: role, seen, history"),
        ("types: {a: {role: positive, limit: 0}}", "limit=0.0 allowed: more than 0"),
        ("types: {a: {role: positive, weight: -1}}", "a.weight=-1.0; allowed: at least 0"),
        ("types: {a: {role: negative, weight: 1}}", "a.weight=1.0; allowed: at most 0"),
        ("types: {a: {role: exposure, weight: 1}}", "allowed: neither, it was shown and not taken"),
        ("types: {a: {role: exposure, seen: true, history: true}}", "allowed: neither"),
        ("types: {a: {role: positive, seen: false}}", "allowed: what is in a history counts as seen"),
        ("types: {a: {role: neutral}, a: {role: positive}}", "a stands twice; allowed: once"),
        ("types: {}\ndefault: {role: neutral}\ndefault: {role: positive}", "default stands twice; allowed: once"),
        ("types: {3: {role: neutral}}", "type 3; allowed: text of 1 to 64 bytes"),
        ("types: {'': {role: neutral}}", "type ''; allowed: text of 1 to 64 bytes"),
        (f"types: {{{'a' * 65}: {{role: neutral}}}}", "allowed: text of 1 to 64 bytes"),
        (f"types: {{{MANY}}}", "257 types; allowed: at most 256"),
        ("#" * (MAX_BYTES + 1), f"{MAX_BYTES + 1} bytes; allowed: at most {MAX_BYTES}"),
        ("types: {a: {role: positive", "events.yaml: while parsing"),
        ("types: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_a_bad_schema_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(SchemaError) as raised:
        parse(text)
    assert message in str(raised.value)
    assert str(raised.value).startswith("events.yaml")


def test_bytes_that_are_no_text_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"events\.yaml"):
        EventSchema.parse(b"types: \xff\xfe", "events.yaml")
    with pytest.raises(SchemaError, match="missing: No such file"):
        EventSchema.read(tmp_path / "missing")
