"""NumPy, written as well as NumPy allows: in place, with its BLAS."""

import math

import numpy as np


def start(threads):
    pass  # the environment of the process sets its BLAS


def versions():
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {"NumPy": f"{np.__version__} ({blas.get('name', 'no BLAS')} {blas.get('version', '')})"}


def to_numpy(a):
    return np.array(a)


def matmul(data, s):
    a, b = data["a"], data["b"]
    if s["form"] == "nt":
        return lambda: (a @ b.T,)
    if s["form"] == "tn":
        return lambda: (a.T @ b,)
    return lambda: (a @ b,)


def _softmax(x):
    """In place."""
    x -= x.max(-1, keepdims=True)
    np.exp(x, out=x)
    x /= x.sum(-1, keepdims=True)
    return x


def softmax(data, s):
    x = data["x"]
    return lambda: (_softmax(x.copy()),)


def softmax_backward(data, s):
    x, dy = data["x"], data["dy"]

    def run():
        y = _softmax(x.copy())
        dx = dy - np.einsum("mn,mn->m", y, dy)[:, None]
        dx *= y
        return y, dx

    return run


_C = math.sqrt(2 / math.pi)


def _tanh_part(x):
    u = x * x
    u *= 0.044715
    u += 1
    u *= x
    u *= _C
    return np.tanh(u, out=u)


def gelu(data, s):
    x = data["x"]

    def run():
        y = _tanh_part(x)
        y += 1
        y *= x
        y *= 0.5
        return (y,)

    return run


def gelu_backward(data, s):
    x, dy = data["x"], data["dy"]

    def run():
        t = _tanh_part(x)
        y = 0.5 * x * (1 + t)
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _C * (1 + 3 * 0.044715 * x * x)
        slope *= dy
        return y, slope

    return run


def _normalised(x):
    y = x - x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(np.einsum("mn,mn->m", y, y)[:, None] / x.shape[-1] + 1e-5)
    y *= scale
    return y, scale


def layer_norm(data, s):
    x, gamma, beta = data["x"], data["gamma"], data["beta"]

    def run():
        y, _ = _normalised(x)
        y *= gamma
        y += beta
        return (y,)

    return run


def layer_norm_backward(data, s):
    x, dy, gamma, beta = data["x"], data["dy"], data["gamma"], data["beta"]

    def run():
        n, scale = _normalised(x)
        g = dy * gamma
        dx = g - g.mean(-1, keepdims=True)
        dx -= n * (np.einsum("mn,mn->m", g, n) / x.shape[1])[:, None]
        dx *= scale
        return n * gamma + beta, dx, np.einsum("mn,mn->n", dy, n), dy.sum(0)

    return run


def cross_entropy(data, s):
    x, targets = data["x"], data["targets"]
    rows = np.arange(len(x))

    def run():
        p = _softmax(x.copy())
        loss = -np.log(p[rows, targets]).mean()
        p[rows, targets] -= 1
        p /= len(x)
        return loss, p

    return run


def adamw(data, s):
    params, grads = [p.copy() for p in data["p"]], data["g"]
    m, v = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
    lr, b1, b2, eps, decay, step = 1e-3, 0.9, 0.99, 1e-8, 0.1, 0

    def run():
        nonlocal step
        step += 1
        size, root = lr / (1 - b1**step), math.sqrt(1 - b2**step)
        for p, g, mi, vi in zip(params, grads, m, v, strict=True):
            p *= 1 - lr * decay
            mi *= b1
            mi += (1 - b1) * g
            vi *= b2
            vi += (1 - b2) * (g * g)
            d = np.sqrt(vi)
            d /= root
            d += eps
            np.divide(mi, d, out=d)
            d *= size
            p -= d

    def check():
        run()
        return (params,)

    return run, check


def _attend(q, k, v, hidden):
    scores = q @ k.swapaxes(-1, -2)
    scores *= 1 / math.sqrt(q.shape[-1])
    scores += hidden
    return _softmax(scores) @ v


def _hidden(T):
    return np.triu(np.full((T, T), -np.inf, np.float32), 1)


def attention(data, s):
    q, k, v, hidden = data["q"], data["k"], data["v"], _hidden(s["T"])
    return lambda: (_attend(q, k, v, hidden),)


def mha(data, s):
    x, B, T, D, H, hidden = data["x"], s["B"], s["T"], s["D"], s["H"], _hidden(s["T"])
    weight = np.concatenate([data[f"{c}.weight"] for c in ("c_q", "c_k", "c_v")], 1)
    bias = np.concatenate([data[f"{c}.bias"] for c in ("c_q", "c_k", "c_v")])

    def run():
        q, k, v = (x.reshape(-1, D) @ weight + bias).reshape(B, T, 3, H, D // H).transpose(2, 0, 3, 1, 4)
        y = _attend(q, k, v, hidden).swapaxes(1, 2).reshape(-1, D)
        return ((y @ data["c_proj.weight"] + data["c_proj.bias"]).reshape(B, T, D),)

    return run


OPS = {
    f.__name__: f
    for f in (
        matmul, softmax, softmax_backward, gelu, gelu_backward, layer_norm, layer_norm_backward, cross_entropy, adamw,
        attention, mha,
    )
}  # fmt: skip
