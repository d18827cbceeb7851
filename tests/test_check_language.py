"""The check for phrases and names that readers would not search for."""

import pytest
from check_language import find_identifiers, find_phrases

PHRASES = {"gone on with": "resumed", "mend": "fix"}
NAMES = {"Crew": "WorkerPool"}


@pytest.mark.parametrize(
    "text",
    [
        "a run is gone on with",
        "A run is Gone On With.",
        "# a run is gone\n    # on with later",
        'message = "a run is gone "\n    "on with"',
    ],
)
def test_a_phrase_is_found_in_any_case_and_across_lines(text: str) -> None:
    (found,) = find_phrases(text, PHRASES)
    assert "gone on with" in found
    assert "resumed" in found


def test_every_occurrence_is_listed_with_its_line() -> None:
    found = find_phrases("mend it\n\nthen mend that, gone on with", PHRASES)
    assert [each.split(":")[0] for each in found] == ["1", "3", "3"]


@pytest.mark.parametrize("text", ["a recommended value", "amend", "he is gone and on with it", "mend-all"])
def test_parts_of_words_and_other_phrases_are_not_found(text: str) -> None:
    assert find_phrases(text, PHRASES) == []


def test_a_name_is_found_exactly_with_or_without_underscore() -> None:
    assert len(find_identifiers("class Crew: ...\nclass _Crew: ...", NAMES)) == 2
    assert find_identifiers("crew = CrewMember('Crews')", NAMES) == []
