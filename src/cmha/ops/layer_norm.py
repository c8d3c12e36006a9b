"""Layer norm over the last axis (Ba et al. 2016): gamma (x - mean) / sqrt(var + eps) + beta."""

from cmha import _core


def layer_norm(x, gamma, beta=None, *, eps=1e-5):
    """x (..., N), gamma and beta (N,)."""
    y, stats = _core.layer_norm_forward(x, gamma, beta, eps)

    def vjp(dy):
        dx, dgamma, dbeta = _core.layer_norm_backward(dy, x, stats, gamma)
        return (dx, dgamma, dbeta) if beta is not None else (dx, dgamma)

    return y, vjp
