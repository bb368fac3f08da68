"""What Heeler says is heard once: by warnings, or by the logger where a filter stands in the way."""

from __future__ import annotations

import logging
import warnings

import pytest

from heeler.notices import HeelerWarning, warn


@pytest.mark.parametrize(
    ("filters", "warned"),
    [
        ([], 1),
        ([("always", {})], 1),
        ([("default", {"category": HeelerWarning})], 1),
        ([("ignore", {"category": DeprecationWarning})], 1),
        ([("ignore", {"message": "something else"})], 1),
        ([("ignore", {"module": "another"})], 1),
        ([("ignore", {}), ("always", {"category": HeelerWarning})], 1),  # the last one that is added goes first
        ([("ignore", {})], 0),
        ([("ignore", {"category": UserWarning})], 0),
        ([("ignore", {"message": "3 sketches"})], 0),
        ([("ignore", {"module": "tests.test_notices"})], 0),
        ([("error", {})], 0),
        ([("error", {"category": HeelerWarning})], 0),
    ],
)
def test_a_word_is_heard_once(filters: list, warned: int, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as heard, caplog.at_level(logging.WARNING, "heeler"):
        warnings.resetwarnings()
        for action, options in filters:
            warnings.filterwarnings(action, **options)
        warn("%d sketches are left out of %s", 3, "100%")
    assert [str(each.message) for each in heard] == ["3 sketches are left out of 100%"] * warned
    assert [record.getMessage() for record in caplog.records] == ["3 sketches are left out of 100%"] * (1 - warned)


def test_what_python_starts_with_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    """Its own filters name modules by strings, not by patterns."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.filters[:] = [("ignore", None, UserWarning, "__main__", 0), ("default", None, Warning, None, 0)]
        warn("a word")
    assert len(heard) == 1
    assert not caplog.records


def test_a_word_points_to_who_says_it() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warn("a word")
    assert heard[0].filename == __file__
    assert heard[0].category is HeelerWarning
