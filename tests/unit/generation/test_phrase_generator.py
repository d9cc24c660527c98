"""Generation end to end: answers are of the catalogue, filters hold, changes are seen at once, parts must fit."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from identifier_scene import small_generator

from services.algorithms.bundles.model_manifest import BundleError
from services.algorithms.bundles.tensor_file import read_tensors
from services.algorithms.bundles.tensor_writer import SlicedTensor, write_tensors
from services.algorithms.generation.generator import Generated, Generator, GeneratorSettings
from services.algorithms.generation.identifiers import IdentifierTable
from services.algorithms.generation.output_layer import OutputLayer
from services.algorithms.generation.shortlist import Shortlist
from services.algorithms.generation.trie import IdentifierTrie

POSITIONS, WIDTH, COUNT = 4, 24, 300


@pytest.fixture(scope="module")
def generator() -> Generator:
    return small_generator(0, count=COUNT, positions=POSITIONS, width=WIDTH)


def outputs(seed: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(1 + POSITIONS, WIDTH)).astype(np.float32) * np.float32(scale)


def plain(found: Generated) -> list[tuple[int, str, list[int], float]]:
    return [(answer.identifier, answer.text, answer.item_rows.tolist(), answer.score) for answer in found.answers]


def adversarial(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Zeros, one direction everywhere, huge and tiny values, one hot: what a broken encoder may say."""
    kind = rng.integers(0, 6)
    if kind == 0:
        return np.zeros_like(x)
    if kind == 1:
        return np.tile(x[0], (len(x), 1))
    if kind == 2:
        return (x * np.float32(10.0) ** rng.integers(-30, 15)).astype(np.float32)
    if kind == 3:
        return np.eye(len(x), x.shape[1], k=int(rng.integers(0, 9)), dtype=np.float32) * 50
    if kind == 4:
        return -np.abs(x) * 100
    return np.sign(x)


def test_two_thousand_random_and_adversarial_queries_answer_only_with_the_catalogue(generator: Generator) -> None:
    """The whole 100,000 are part of `freshet bench generation`."""
    rng = np.random.default_rng(0)
    texts = [generator.identifiers.text(identifier) for identifier in range(COUNT)]
    for number in range(2000):
        x = outputs(number)
        if number % 2:
            x = adversarial(rng, x)
        found = generator.generate(x, 10)
        identifiers = [answer.identifier for answer in found.answers]
        assert len(set(identifiers)) == len(identifiers)
        for answer in found.answers:
            assert answer.identifier in generator.trie
            assert answer.text == texts[answer.identifier]
        assert all(np.isfinite(answer.score) for answer in found.answers)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 0.003, 0.05, 0.6, 1.0]), k=st.sampled_from([1, 7, 400])
)
@example(seed=1238482, share=0.003, k=1)  # of four allowed items one far down fills the beams' answer, unproven
def test_only_allowed_items_come_out_and_a_filter_does_not_starve_the_answer(
    generator: Generator, seed: int, share: float, k: int
) -> None:
    x, allowed = outputs(seed), np.random.default_rng(seed).random(2 * COUNT) < share
    everything = plain(generator.generate(x, 1000))
    wanted = [
        (identifier, text, [row for row in rows if allowed[row]][:k], score)
        for identifier, text, rows, score in everything
        if allowed[rows].any()
    ]
    found = generator.generate(x, k, allowed)
    places = [wanted.index(answer) for answer in plain(found)]
    assert places == sorted(places)
    assert len(places) == min(k, len(wanted))
    if found.exact:
        assert places == list(range(len(places)))


def test_an_inserted_identifier_is_the_next_querys_best_and_a_deleted_one_is_gone() -> None:
    generator = small_generator(1, count=COUNT, positions=POSITIONS, width=WIDTH)
    x = outputs(3)
    best = generator.generate(x, 1).answers[0]
    tokens = [int(token) for token in best.text.split()]
    added = generator.insert("the same phrases, another item", tokens, [17, 18])
    found = generator.generate(x, 2).answers
    assert [answer.identifier for answer in found] == [best.identifier, added]
    assert (found[1].text, found[1].item_rows.tolist()) == ("the same phrases, another item", [17, 18])
    assert found[0].score == found[1].score
    assert generator.delete(best.identifier)
    assert not generator.delete(best.identifier)
    assert generator.generate(x, 1).answers[0].identifier == added
    assert best.identifier not in [answer.identifier for answer in generator.generate(x, 1000).answers]


def test_an_insert_that_cannot_be_leaves_nothing_behind(generator: Generator) -> None:
    for tokens, rows, message in (
        ([1] * (POSITIONS + 1), [0], f"an identifier of {POSITIONS + 1} tokens; allowed: 1 to {POSITIONS}"),
        ([], [0], "an identifier of 0 tokens"),
        ([0], [0], "token=0 allowed: 1 to 199"),
        ([200], [0], "token=200 allowed: 1 to 199"),
        ([1], [], "item_rows="),
        ([1], [-2], "item_rows="),
    ):
        with pytest.raises(ValueError, match=message):
            generator.insert("x", tokens, rows)
    assert len(generator.identifiers) == len(generator.trie) == COUNT


def test_a_million_equal_titles_are_one_identifier_with_as_many_items_as_asked_for() -> None:
    """And a million identifiers of the same phrases are answered in order."""
    count = 1_000_000
    trie = IdentifierTrie.build_flat(
        np.ones(count, dtype=np.int32), np.arange(count + 1), np.arange(count), max_tokens=1, num_tokens=2
    )
    parts = {
        "output_layer": OutputLayer.from_weights(np.ones((2, 4), dtype=np.float32)),
        "shortlist": Shortlist(np.ones((1, 4), np.float32), np.array([[1, 0]], dtype=np.int32), num_tokens=2),
    }
    table = IdentifierTable(
        np.zeros(0, dtype=np.uint8),
        np.zeros(count + 1, dtype=np.int64),
        np.arange(count, dtype=np.int32),
        np.arange(count + 1),
    )
    x = np.ones((2, 4), dtype=np.float32)
    found = Generator(trie=trie, identifiers=table, **parts).generate(x, 3)
    assert [answer.item_rows.tolist() for answer in found.answers] == [[0], [1], [2]]
    one = Generator(
        trie=IdentifierTrie.build([[1]], [0], max_tokens=1, num_tokens=2),
        identifiers=IdentifierTable.build(["same"], [range(count)]),
        **parts,
    )
    assert one.generate(x, 3).answers[0].item_rows.tolist() == [0, 1, 2]
    allowed = np.zeros(count, dtype=bool)
    allowed[[5, 999_999]] = True
    assert one.generate(x, 3, allowed).answers[0].item_rows.tolist() == [5, 999_999]


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        (np.zeros((1, WIDTH)), 3, r"x has shape \(1, 24\); allowed: \(1 \+ s, 24\)"),
        (np.zeros((5, 7)), 3, r"x0 has shape \(7,\); allowed: \(24,\)"),
        (np.full((5, WIDTH), np.nan), 3, "x0 holds a value that is not finite"),
        (np.pad(np.full((1, WIDTH), np.inf), ((4, 0), (0, 0))), 3, "x holds a value that is not finite"),
        (np.zeros((5, WIDTH)), 0, "results=0 allowed: at least 1"),
        (np.zeros((3, WIDTH)), 3, "identifiers have up to 4 tokens; allowed: 2, the positions"),
    ],
)
def test_a_wrong_question_says_what_is_allowed(generator: Generator, x: np.ndarray, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generator.generate(x.astype(np.float32), k)


def test_parts_of_different_models_are_refused_with_both_values(generator: Generator) -> None:
    other = small_generator(0, count=20, num_tokens=60, width=8)
    for name, message in (
        ("output_layer", "shortlist is of 200 tokens, the output layer of 60"),
        ("shortlist", "shortlist is of 60 tokens, the output layer of 200"),
        ("trie", "trie is of 60 tokens, the output layer of 200"),
        ("identifiers", "the trie names identifier 299; the table has 20"),
    ):
        parts = {part: getattr(generator, part) for part in ("output_layer", "shortlist", "trie", "identifiers")}
        with pytest.raises(ValueError, match=message):
            Generator(**{**parts, name: getattr(other, name)})
    with pytest.raises(ValueError, match="sets=0 allowed: at least 1"):
        GeneratorSettings(sets=0)


def test_a_saved_generator_answers_the_same_and_takes_changes(generator: Generator, tmp_path: Path) -> None:
    fresh = small_generator(0, count=COUNT, positions=POSITIONS, width=WIDTH)
    fresh.save(tmp_path / "generator")
    loaded = Generator.load(tmp_path / "generator")
    assert loaded.settings == fresh.settings
    for seed in range(20):
        assert plain(loaded.generate(outputs(seed), 10)) == plain(fresh.generate(outputs(seed), 10))
    best = loaded.generate(outputs(0), 1).answers[0]
    added = loaded.insert("new", [int(token) for token in best.text.split()], [3])
    loaded.delete(best.identifier)
    assert loaded.generate(outputs(0), 1).answers[0].identifier == added
    with pytest.raises(ValueError, match="only a built"):
        loaded.save(tmp_path / "changed")


def test_a_file_cut_short_or_with_other_arrays_is_refused(tmp_path: Path) -> None:
    small_generator(0, count=3, num_tokens=50, width=2).save(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "short").write_bytes(whole[:length])
        with pytest.raises(BundleError, match=r"short: "):
            Generator.load(tmp_path / "short")
    found = read_tensors(tmp_path / "whole")
    for number, (name, array, message) in enumerate(
        (
            ("tokens", found["tokens"] + 60, "tokens reach .*; allowed: below 50"),
            ("identifiers", found["identifiers"] + 9, "identifiers reach 11; allowed: below 3"),
            ("identifiers", 0 * found["identifiers"], "identifiers repeat"),
            ("rows", found["rows"][:-1], "the boundaries of rows do not run"),
            ("scales", found["scales"][:-1], "uint8 weights of shape .50, 2. with 49 scales"),
            ("settings", np.array([3, 64, 5, 4]), "out of range"),
            ("children", found["children"].astype(np.int64), "holds .*allowed"),
            ("other", found["rows"], "holds .*allowed"),
        )
    ):
        path = tmp_path / f"wrong-{number}"
        write_tensors(path, {key: SlicedTensor.whole(one) for key, one in {**found, name: array}.items()})
        with pytest.raises(BundleError, match=f"{path.name}.*{message}"):
            Generator.load(path)
