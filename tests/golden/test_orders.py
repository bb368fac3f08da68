"""Orders are what version 0.1 gave: a change of the architecture must not change them."""

import json

import pytest

from tests.golden.orders import FILE, case, cases

EXPECTED = json.loads(FILE.read_text())


def test_no_case_is_missing() -> None:
    assert set(EXPECTED) == set(cases())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_orders_are_those_of_0_1(name: str) -> None:
    assert case(name) == EXPECTED[name]
