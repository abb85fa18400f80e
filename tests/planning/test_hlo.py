"""FLOPs read from compiled programs: products known by construction, and XLA's other notations for them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from megajax.planning.hlo import executed_flops


def flops_of(f, *shapes, **how):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return executed_flops(jax.jit(f).lower(*arrays).compile(), **how)


def test_a_product_is_two_m_n_k():
    assert flops_of(jnp.matmul, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert flops_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (2, 3, 5), (2, 5, 7)) == 2 * 2 * 3 * 5 * 7


def test_loops_multiply():
    def run(x, w):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    assert flops_of(run, (8, 8), (5, 8, 8)) == 5 * 2 * 8**3


def test_loops_that_depend_on_data_are_as_long_as_one_says():
    def run(x, n):
        return lax.fori_loop(0, n[0].astype(int), lambda _, x: jnp.tanh(x @ x), x)

    assert flops_of(run, (8, 8), (1,), unknown=3) == 3 * 2 * 8**3
    with pytest.raises(ValueError, match="multiplies an unknown number of times: say how often"):
        flops_of(run, (8, 8), (1,))


def test_xlas_other_spellings():
    """A cuBLAS call, with its operands' names only; cuDNN's causal attention, forward and backward: B 1, N 4, S 64."""
    scores = (
        '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["1", "4", "64", "64"]}, '
        '"mask_type": "CAUSAL"'
    )
    text = f"""HloModule m

ENTRY %main (q: bf16[1,64,4,32]) -> bf16[8,16] {{
  %q = bf16[1,64,4,32]{{3,2,1,0}} parameter(0)
  %a = bf16[8,24]{{1,0}} bitcast(%q)
  %b = bf16[24,16]{{1,0}} bitcast(%q)
  %f = (bf16[1,4,64,32]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", operand_layout_constraints={{bf16[1,64,4,32]{{3,2,1,0}}, bf16[1,64,1,32]{{3,2,1,0}}}}, backend_config={{{scores}}}
  %g = (bf16[1,4,64,32]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaScaleBiasSoftmaxDropoutBackward", operand_layout_constraints={{bf16[1,64,4,32]{{3,2,1,0}}}}, backend_config={{{scores}}}
  ROOT %c = (bf16[8,16]{{1,0}}, s8[4096]{{0}}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}}}}
}}
"""  # noqa: E501
    assert executed_flops(text) == 2 * 8 * 16 * 24 + (2 + 5) * 2 * 4 * 64 * 64 * 32 // 2
    with pytest.raises(ValueError, match="kernel 'another_gemm' multiplies nobody knows how much"):
        executed_flops(text.replace("__cublas$gemm", "another_gemm"))
