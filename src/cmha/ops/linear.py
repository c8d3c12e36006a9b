"""y = x W + b with W (n_in, n_out), as GPT-2 stores it."""

from cmha import _core


def linear(x, weight, bias=None):
    """x (..., n_in) -> (..., n_out);  dx = dy W^T,  dW = x^T dy and db = sum dy over all rows."""
    y = _core.linear_forward(x, weight, bias)
    n_in, n_out = weight.shape

    def vjp(dy):
        rows, drows = x.reshape((-1, n_in)) if x.size else x.reshape((0, n_in)), dy.reshape((y.size // n_out if n_out else 0, n_out))
        dx = _core.matmul(drows, weight.permute((1, 0))).reshape(x.shape)
        dweight = _core.matmul(rows.permute((1, 0)), drows)
        return (dx, dweight) if bias is None else (dx, dweight, _core.sum(drows, (0,)))

    return y, vjp
