"""A phrase model learns a tiny corpus, through the real decoder; what does not fit is refused or counted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from phrase_scene import WordTokens, corpus, tiny_encoder

from services.algorithms.generation.generator import Generator, GeneratorSettings
from services.offline.training.models.phrase_nar import PhraseShape
from services.offline.training.phrases.fit import PhraseSettings, train_phrases
from services.offline.training.phrases.identifiers import identifiers_of
from services.offline.training.phrases.questions import drawn_targets, training_questions
from services.offline.training.phrases.shortlist_fit import ShortlistSize, covered, fit_shortlist

SETTINGS = PhraseSettings(
    positions=3,
    max_tokens=16,
    epochs=52,
    least_steps=0,
    batch=25,
    encoder_rate=3e-3,
    output_rate=5e-2,
    shortlist=ShortlistSize(vectors=8, tokens=6, joined=2),
)


@pytest.fixture(scope="module")
def trained():
    return train_phrases(*corpus(), WordTokens(), SETTINGS, 0, encoder=tiny_encoder)


def reciprocal_ranks(trained, generator: Generator) -> list[float]:
    pairs, _ = corpus()
    ranks = []
    for x, (_, row) in zip(trained.encode([text for text, _ in pairs]), pairs, strict=True):
        rows = [row for answer in generator.generate(x, 10).answers for row in answer.item_rows.tolist()]
        ranks.append(1 / (1 + rows.index(row)) if row in rows else 0.0)
    return ranks


@pytest.mark.parametrize("mode", ["fixed", "permutation"])
def test_a_tiny_corpus_is_learnt_and_generated_by_the_decoder(trained, mode):
    generator = trained.generator(GeneratorSettings(sets=3, mode=mode))
    assert np.mean(reciprocal_ranks(trained, generator)) > 0.95


def test_the_partition_sum_is_driven_to_one(trained):
    x = trained.encode([text for text, _ in corpus()[0]])
    log_sums = torch.logsumexp(torch.from_numpy(x[:, 1:]) @ torch.from_numpy(trained.weights).T, dim=-1)
    assert float(log_sums.abs().mean()) < 0.3


def test_equal_seeds_train_equal_models_and_leave_the_callers_random_state_alone():
    short = replace(SETTINGS, epochs=2)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = train_phrases(*corpus(), WordTokens(), short, 3, encoder=tiny_encoder)
    assert torch.equal(torch.rand(1), expected)
    two = train_phrases(*corpus(), WordTokens(), short, 3, encoder=tiny_encoder)
    other = train_phrases(*corpus(), WordTokens(), short, 4, encoder=tiny_encoder)
    assert np.array_equal(one.weights, two.weights)
    assert np.array_equal(one.sets, two.sets)
    assert not np.array_equal(one.weights, other.weights)


def test_a_padded_batch_answers_as_each_query_alone(trained):
    texts = ["", "red", "show me a red house", "show me a green stone a red ship", "unknown words 🙂"]
    together = trained.encode(texts)
    for row, text in enumerate(texts):
        np.testing.assert_allclose(trained.encode([text])[0], together[row], atol=2e-5)
    assert trained.encode([]).shape == (0, 4, 32)
    assert trained.encode(["red " * 100_000]).shape == (1, 4, 32)


def test_an_input_longer_than_the_encoder_is_refused():
    encoder, _ = tiny_encoder(3)
    ids = torch.ones(1, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match="17 columns; allowed: at most 16"):
        encoder(ids, ids)


@pytest.mark.parametrize("positions", [0, 16])
def test_positions_out_of_range_are_refused(positions):
    with pytest.raises(ValueError, match=f"positions={positions}; allowed: 1 to 15"):
        PhraseShape(positions=positions, max_tokens=16, width=32)


def test_long_identifiers_are_left_out_and_a_documents_only_one_is_cut():
    documents = [["red green blue white", "red house"], ["black green blue white"], ["red house", "🙂"]]
    found = identifiers_of(documents, WordTokens(), positions=2)
    words = WordTokens()
    assert [" ".join(map(words.phrase, tokens)) for tokens in found.tokens] == ["red house", "black green"]
    assert found.documents == [[0, 2], [1]]
    assert found.of_document == [[0], [1], [0]]
    assert (found.left_out, found.cut) == (1, 1)


def test_a_document_without_identifier_is_refused_by_row():
    with pytest.raises(ValueError, match=r"documents\[1\]=\['🙂'\] has no identifier"):
        identifiers_of([["red"], ["🙂"]], WordTokens())
    with pytest.raises(ValueError, match="documents has 0 rows"):
        identifiers_of([], WordTokens())


def test_one_document_and_many_equal_titles_train():
    short = replace(SETTINGS, epochs=1)
    one = train_phrases([("red", 0)], [["red house"]], WordTokens(), short, 0, encoder=tiny_encoder)
    assert one.generator().generate(one.encode(["red"])[0], 5).answers[0].item_rows.tolist() == [0]
    equal = train_phrases([], [["red house"]] * 300, WordTokens(), short, 0, encoder=tiny_encoder)
    assert len(equal.identifiers) == 1
    assert len(equal.generator().generate(equal.encode(["red"])[0], 5).answers[0].item_rows) == 5


def test_a_question_is_taught_the_other_identifiers_of_its_document():
    documents = [["red", "green", "blue"], ["black"]]
    tokenizer = WordTokens()
    identifiers = identifiers_of(documents, tokenizer, positions=1)
    own = {text: place for place, text in enumerate(("red", "green", "blue", "black"))}
    questions, aside = training_questions([], documents, own.__getitem__, held_out=0, seed=0)
    assert len(aside) == 0
    seen: dict[str, set[str]] = {text: set() for text in own}
    for seed in range(30):
        targets = drawn_targets(questions, identifiers, np.random.default_rng(seed))
        for text, row in zip(questions.texts, targets, strict=True):
            seen[text].add(tokenizer.phrase(row[0]))
    assert seen == {
        "red": {"green", "blue"},
        "green": {"red", "blue"},
        "blue": {"red", "green"},
        "black": {"black"},
    }


def test_nothing_of_a_held_out_text_is_trained_on():
    pairs, documents = corpus()
    questions, aside = training_questions(pairs, documents, lambda text: -1, held_out=10, seed=1)
    assert len(aside) == 10
    assert not set(aside.texts) & set(questions.texts)


def test_at_most_twenty_identifiers_of_a_document_become_questions():
    questions, _ = training_questions([], [[f"red {n}" for n in range(50)]], lambda text: -1, held_out=0, seed=0)
    assert len(set(questions.texts)) == len(questions.texts) == 20


def test_a_pair_of_an_unknown_document_is_refused():
    with pytest.raises(ValueError, match="document row; allowed: 0 to 0"):
        train_phrases([("red", 1)], [["red"]], WordTokens(), SETTINGS, 0, encoder=tiny_encoder)


def test_few_questions_are_gone_through_more_often_until_there_were_enough_steps():
    settings = replace(SETTINGS, epochs=1, least_steps=13)
    report = train_phrases(*corpus(), WordTokens(), settings, 0, encoder=tiny_encoder).report
    of_an_epoch = report["steps"] // report["epochs"]

    assert of_an_epoch > 1
    assert report["epochs"] == -(-13 // of_an_epoch)
    assert report["steps"] == report["epochs"] * of_an_epoch


@pytest.mark.parametrize(
    ("name", "value"),
    [("epochs", 0), ("least_steps", -1), ("batch", -1), ("seconds", 0.0)],
)
def test_settings_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        PhraseSettings(**{name: value})


def test_the_shortlist_finds_the_tokens_of_clusters():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(60, 64, generator=generator)
    groups = [list(range(start, start + 6)) for start in range(0, 60, 6)]
    x0 = torch.stack([weights[group].sum(dim=0) for group in groups for _ in range(8)])
    # As layer norms leave them: of one length.
    x0 = torch.nn.functional.normalize(x0 + 0.1 * torch.randn(x0.shape, generator=generator), dim=1) * 4
    targets = [group[:3] if row % 2 else group[3:] for group in groups for row in range(8)]
    centers, sets = fit_shortlist(x0, targets, weights, ShortlistSize(vectors=16, tokens=8, joined=2))
    assert centers.shape == (16, 64)
    assert sets.shape == (16, 8)
    assert covered(x0, targets, centers, sets, 2) > 0.95
    drawn_sets = torch.stack([torch.randperm(60, generator=generator)[:8] for _ in range(16)])
    assert covered(x0, targets, centers, drawn_sets, 2) < 0.6
