"""Pseudo queries and identifiers of a catalogue of titles."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.offline.training.phrases.pseudo_queries import catalogue_texts, spoken


@pytest.mark.parametrize(
    ("title", "said"),
    [
        ("Usual Suspects, The (1995)", "The Usual Suspects"),
        ("City of Lost Children, The (Cité des enfants perdus, La) (1995)", "The City of Lost Children"),
        ("M (1931)", "M"),
        ("2001: A Space Odyssey (1968)", "2001: A Space Odyssey"),
        ("Crime and Punishment", "Crime and Punishment"),
        ("(500)", "(500)"),
        ("", ""),
    ],
)
def test_titles_are_said_as_people_say_them(title, said):
    assert spoken(title) == said


def test_an_item_is_called_by_title_spoken_title_and_categories_with_decade():
    made = catalogue_texts(["7"], ["Usual Suspects, The (1995)"], [("Crime", "Thriller")])
    assert made.identifiers == [["Usual Suspects, The (1995)", "The Usual Suspects", "Crime Thriller 1990s"]]
    assert made.texts == ["Usual Suspects, The (1995) Crime Thriller"]


def test_pseudo_queries_are_words_of_the_title_and_categories():
    made = catalogue_texts(
        ["7", "8"], ["Usual Suspects, The (1995)", "Heat (1995)"], [("Crime", "Thriller"), ("Crime",)]
    )
    allowed = [{"usual", "suspects", "crime", "thriller"}, {"heat", "crime"}]
    assert {row for _, row in made.pairs} == {0, 1}
    assert all(set(query.split()) <= allowed[row] for query, row in made.pairs)
    assert all(set(query.split()) & {"usual", "suspects", "heat"} for query, _ in made.pairs)


def test_equal_seeds_make_equal_queries():
    columns = [str(row) for row in range(30)], [f"Some Long Title {row}" for row in range(30)], [("A", "B")] * 30
    assert catalogue_texts(*columns, seed=1) == catalogue_texts(*columns, seed=1)
    assert catalogue_texts(*columns, seed=1).pairs != catalogue_texts(*columns, seed=2).pairs


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="2 item ids, 1 titles, 2 categories"):
        catalogue_texts(["1", "2"], ["one"], [(), ()])


@given(st.lists(st.tuples(st.text(max_size=30), st.lists(st.text(max_size=8), max_size=3)), max_size=5))
@settings(max_examples=60, deadline=None)
def test_every_item_has_an_identifier_and_a_query_whatever_its_title(items):
    ids = [f"id{row}" for row in range(len(items))]
    made = catalogue_texts(ids, [title for title, _ in items], [names for _, names in items])
    assert all(any(text.strip() for text in each) for each in made.identifiers)
    assert {row for _, row in made.pairs} == set(range(len(items)))
