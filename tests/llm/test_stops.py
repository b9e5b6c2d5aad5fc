"""Stop strings: cut at the earliest match, nothing of one ever sent, nothing else held back."""

from hypothesis import given
from hypothesis import strategies as st

from tritium.llm.stops import StopMatcher


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    sent = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        sent += text
        if stop is not None:
            return sent, stop
    return sent + matcher.flush(), None


def expected(stops: list[str], text: str, include: bool = False) -> tuple[str, str | None]:
    """The definition: read letter by letter, stop as soon as the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    st.lists(st.text("abc", max_size=5), max_size=8),
    st.booleans(),
)
def test_any_split_gives_the_same(stops: list[str], pieces: list[str], include: bool) -> None:
    assert run(stops, pieces, include) == expected(stops, "".join(pieces), include)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(st.text("abc", max_size=5)))
def test_only_what_may_become_a_stop_is_held_back(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = given_text = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        if stop is not None:
            return
        sent, given_text = sent + text, given_text + piece
        held = given_text[len(sent) :]
        assert held == "" or any(s.startswith(held) for s in stops)


def test_without_stops_everything_passes_at_once() -> None:
    assert StopMatcher([]).push("abc") == ("abc", None)
