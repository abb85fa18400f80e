import jax
import numpy as np
import pytest

from megajax.models.layers import linear


@pytest.mark.parametrize(("contract", "einsum"), [(1, "bsnh,hdf->bsndf"), (2, "bsnh,nhf->bsf")])
def test_contracts_last_dims_with_first(contract, einsum):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4, 5))
    weight = rng.normal(size=(5, 6, 7) if contract == 1 else (4, 5, 6))

    y = linear(jax.numpy.float32(x), jax.numpy.float32(weight), contract)

    np.testing.assert_allclose(y, np.einsum(einsum, x, weight), rtol=1e-5, atol=1e-5)
