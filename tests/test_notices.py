"""How Heeler warns."""

import warnings

import pytest

from heeler.notices import HeelerWarning, warn


def test_a_warning_is_given_once_and_only_as_a_warning(caplog):
    with pytest.warns(HeelerWarning, match="^3 of 4 are lost$") as heard:
        warn("%d of %d are lost", 3, 4)
    assert len(heard) == 1
    assert not caplog.records


def test_where_warnings_are_errors_training_goes_on_and_the_log_has_it(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn("100% are lost")
    assert caplog.messages == ["100% are lost"]
