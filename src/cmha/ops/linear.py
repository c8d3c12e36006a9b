"""y = x W + b with W (n_in, n_out), as GPT-2 stores it."""

from cmha import _core


def linear(x, weight, bias=None):
    """x (..., n_in) -> (..., n_out);  dx = dy W^T,  dW = x^T dy and db = sum dy over all rows."""
    y = _core.linear_forward(x, weight, bias)

    def vjp(dy):
        return _core.linear_backward(dy, x, weight, bias is not None)

    return y, vjp
