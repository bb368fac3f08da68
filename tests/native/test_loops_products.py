import numpy as np
import pytest

from heeler.native.loops import products


@pytest.mark.parametrize(("n", "m", "c"), [(1, 1, 1), (5, 33, 48), (64, 1000, 7)])
def test_products_are_those_of_a_matrix(n, m, c):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((n, c), np.float32), rng.standard_normal((m, c), np.float32)
    np.testing.assert_allclose(products(a, b), a @ b.T, rtol=1e-4, atol=1e-5)
