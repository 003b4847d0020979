from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evap.engine.stop_strings import StopMatcher

few = st.text("abc", max_size=5)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What is shown of `text`: up to the match that ends first, the longer of two that end together."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s and s in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[:end] if include else text[: end - len(stop)], stop


def feed(matcher: StopMatcher, pieces: list[str]) -> str:
    out = ""
    for piece in pieces:
        if matcher.stopped is None:
            out += matcher.feed(piece)
    return out if matcher.stopped is not None else out + matcher.held


@given(
    st.lists(st.text("abcd", max_size=4), max_size=12),
    st.lists(few.filter(bool), min_size=1, max_size=4),
    st.booleans(),
)
def test_shows_what_a_search_of_the_whole_text_would(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    shown = feed(matcher, pieces)
    assert (shown, matcher.stopped) == reference("".join(pieces), stops, include)


@given(st.lists(st.text("abcd", max_size=4), max_size=12), st.lists(few.filter(bool), min_size=1, max_size=4))
def test_holds_back_what_may_become_a_stop_string_and_no_more(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops, include=False)
    text = ""
    for piece in pieces:
        matcher.feed(piece)
        text += piece
        if matcher.stopped is not None:
            break
        starts = [s[:n] for s in stops for n in range(len(s)) if text.endswith(s[:n])]
        assert matcher.held == max(starts, key=len)


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["DEF", "G", "HI", "J"], ["", "", "", ""]),
        (["DEF", "X"], ["", "DEFX"]),
        (["xDEFDEFG", "HIJ"], ["xDEF", ""]),
    ],
)
def test_a_prefix_of_a_stop_string_is_held_back(pieces: list[str], shown: list[str]) -> None:
    """The cases of vllm#3574 and sglang#11446."""
    matcher = StopMatcher(["DEFGHIJ"], include=False)
    assert [matcher.feed(piece) for piece in pieces] == shown


def test_include_stop_holds_nothing_back() -> None:
    matcher = StopMatcher(["END"], include=True)
    assert matcher.feed("xE") == "xE"
    assert matcher.partial
    assert matcher.feed("NDy") == "ND"
    assert matcher.stopped == "END"


def test_characters_with_a_meaning_in_patterns() -> None:
    for stop in ["^", "]", "-", "\\", ".*", "[a-z]"]:
        matcher = StopMatcher([stop], include=False)
        assert matcher.feed("ok" + stop + "more") == "ok"
        assert matcher.stopped == stop


def test_work_is_linear_in_the_text() -> None:
    """A stop string that always almost matches: every step is one look at the failure table."""
    matcher = StopMatcher(["a" * 2000 + "b"], include=False)
    for _ in range(300):
        matcher.feed("a" * 100)
    assert len(matcher.held) == 2000
