"""The table of statuses is whole, and an error carries what a protocol needs."""

from tritium.errors import STATUS, Code, TritiumError, invalid


def test_every_code_has_statuses() -> None:
    assert set(STATUS) == set(Code)
    assert all(status.v1 >= 400 and status.v2 >= 400 for status in STATUS.values())
    numbers = [status.grpc for status in STATUS.values()]
    assert len(set(numbers)) == len(numbers)


def test_an_error_names_what_is_wrong() -> None:
    error = invalid("top_p is 2, expected 0 to 1", param="top_p", reason="range")
    assert (str(error), error.code, error.param, error.reason) == (
        "top_p is 2, expected 0 to 1",
        Code.INVALID_ARGUMENT,
        "top_p",
        "range",
    )
    assert error.status.v2 == 400
    assert TritiumError(Code.UNAVAILABLE, "full", retry_after_s=2).retry_after_s == 2
