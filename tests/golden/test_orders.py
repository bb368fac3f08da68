"""Orders stay as they were."""

import json

import pytest

from tests.golden.orders import FILE, case, cases, orders, rows

EXPECTED = json.loads(FILE.read_text())


def test_no_case_is_missing() -> None:
    assert set(EXPECTED) == set(cases())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_orders_stay(name: str) -> None:
    assert case(name) == EXPECTED[name]


def test_sums_of_herd_are_exact() -> None:
    """In whatever order columns are added up, orders are the same, as they must be on another machine."""
    data = rows(6, "herd")
    for columns in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3], [3, 1, 4, 0, 5, 2]):
        assert orders(data[:, columns], order="herd") == EXPECTED["herd/one"]
