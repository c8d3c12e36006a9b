"""JAX: whole computations under one jit, parameters and moments donated."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def start(threads):
    pass  # the worker binds the process to as many CPUs, which is what XLA's thread pool goes by


def versions():
    return {"JAX": jax.__version__}


def to_numpy(x):
    return np.array(x)


def _jitted(function, *arguments):
    function = jax.jit(function)
    arguments = [jnp.asarray(a) for a in arguments]
    return lambda: jax.block_until_ready(function(*arguments))


def _attend(q, k, v):
    """(B, H, T, hd); the causal mask is part of the fused softmax."""
    T = q.shape[2]
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.shape[3])
    scores = jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores, -1), v)


def attention(data, s):
    return _jitted(lambda q, k, v: (_attend(q, k, v),), data["q"], data["k"], data["v"])


def attention_backward(data, s):
    def both(q, k, v, dy):
        y, vjp = jax.vjp(_attend, q, k, v)
        return y, *vjp(dy)

    return _jitted(both, data["q"], data["k"], data["v"], data["dy"])


def _mha(x, w, H, prefix=""):
    B, T, D = x.shape
    parts = [f"{prefix}{c}" for c in ("c_q", "c_k", "c_v")]
    weight = jnp.concatenate([w[f"{c}.weight"] for c in parts], 1)
    bias = jnp.concatenate([w[f"{c}.bias"] for c in parts])
    q, k, v = (x @ weight + bias).reshape(B, T, 3, H, D // H).transpose(2, 0, 3, 1, 4)
    y = _attend(q, k, v).transpose(0, 2, 1, 3).reshape(B, T, D)
    return y @ w[f"{prefix}c_proj.weight"] + w[f"{prefix}c_proj.bias"]


def _mha_weights(data):
    return {name: jnp.asarray(a) for name, a in data.items() if name.startswith("c_")}


def mha(data, s):
    w = _mha_weights(data)
    function, x = jax.jit(lambda x, w: _mha(x, w, s["H"])), jnp.asarray(data["x"])
    return lambda: (jax.block_until_ready(function(x, w)),)


def mha_backward(data, s):
    w, x, dy = _mha_weights(data), jnp.asarray(data["x"]), jnp.asarray(data["dy"])

    @jax.jit
    def both(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: _mha(x, w, s["H"]), x, w)
        return y, *vjp(dy)

    def run():
        y, dx, dw = jax.block_until_ready(both(x, w, dy))
        return y, dx, [dw[name] for name in sorted(dw)]

    return run


def _layer_norm(x, w, name):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _loss(w, ids, targets, L, H):
    x = w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]]
    for i in range(L):
        h = f"h.{i}."
        x = x + _mha(_layer_norm(x, w, f"{h}ln_1"), w, H, f"{h}attn.")
        u = _layer_norm(x, w, f"{h}ln_2") @ w[f"{h}mlp.c_fc.weight"] + w[f"{h}mlp.c_fc.bias"]
        x = x + jax.nn.gelu(u, approximate=True) @ w[f"{h}mlp.c_proj.weight"] + w[f"{h}mlp.c_proj.bias"]
    logits = _layer_norm(x, w, "ln_f") @ w["wte.weight"].T
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


def train(data, s):
    ids, targets = jnp.asarray(data["ids"]), jnp.asarray(data["targets"])
    w = {name: jnp.asarray(a) for name, a in data.items() if name not in ("ids", "targets")}
    state = w, jax.tree.map(jnp.zeros_like, w), jax.tree.map(jnp.zeros_like, w), jnp.zeros((), jnp.int32)
    lr, b1, b2, eps, decay = 1e-3, 0.9, 0.99, 1e-8, 0.1

    def loss_of(w):
        return _loss(w, ids, targets, s["L"], s["H"])

    def step(w, m, v, t):
        loss, g = jax.value_and_grad(loss_of)(w)
        t = t + 1
        norm = jnp.sqrt(sum(jnp.vdot(x, x) for x in g.values()))
        g = {name: x * jnp.minimum(1.0, 1.0 / norm) for name, x in g.items()}
        m = {name: b1 * m[name] + (1 - b1) * g[name] for name in w}
        v = {name: b2 * v[name] + (1 - b2) * g[name] ** 2 for name in w}
        size, root = lr / (1 - b1**t), jnp.sqrt(1 - b2**t)
        w = {
            name: p * (1 - lr * decay * (p.ndim >= 2)) - size * m[name] / (jnp.sqrt(v[name]) / root + eps)
            for name, p in w.items()
        }
        return loss, w, m, v, t

    step = jax.jit(step, donate_argnums=(0, 1, 2))

    def run():
        nonlocal state
        loss, *state = jax.block_until_ready(step(*state))
        return (loss,)

    def check():
        g = jax.jit(jax.grad(loss_of))(state[0])
        found = [np.array(g[name]) for name in sorted(g)]
        return run()[0], found, run()[0]

    return run, check


OPS = {f.__name__: f for f in (attention, attention_backward, mha, mha_backward, train)}
