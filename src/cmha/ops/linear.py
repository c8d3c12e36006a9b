"""y = x W + b with W (n_in, n_out), as GPT-2 stores it."""

import math

from cmha import _core


def linear(x, weight, bias=None):
    """x (..., n_in) -> (..., n_out);  dx = dy W^T,  dW = x^T dy and db = sum dy over all rows."""
    y = _core.linear_forward(x, weight, bias)
    n_in, n_out = weight.shape

    def vjp(dy):
        n_rows = math.prod(x.shape[:-1])  # not -1: any of the sizes may be 0
        rows, drows = x.reshape((n_rows, n_in)), dy.reshape((n_rows, n_out))
        dx = _core.matmul(drows, weight.permute((1, 0))).reshape(x.shape)
        dweight = _core.matmul(rows.permute((1, 0)), drows)
        return (dx, dweight) if bias is None else (dx, dweight, _core.sum(drows, (0,)))

    return y, vjp
