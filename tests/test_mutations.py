"""Negative controls: a checker that passes a wrong kernel is a failed test.

Each entry is a check, the right formula and a wrong one. The check must pass with the first and fail with the second.
Wrong values stand in the reference (the comparison is symmetric), wrong gradients in the op's vjp. (G6)
"""

import math

import numpy as np
import pytest

import cmha
import cmha.ops
from cmha import _core, nn, no_grad
from cmha.tensor import make

from . import cases, reference
from .checking import array, check, floats, gradcheck, same_bits
from .models import ids, tiny, weights64
from .test_gpt import check_model_gradient
from .test_numerics import check_adamw


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- checks: each takes the formula under trial ---------------------------------------------------------------------

def attention_value(attention, T=7, S=11, is_causal=True):
    inputs = normal(2, 3, T, 5), normal(2, 3, S, 5, seed=1), normal(2, 3, S, 5, seed=2)
    got = cmha.scaled_dot_product_attention(*map(cmha.tensor, inputs), is_causal=is_causal)
    check(got, attention(*floats(*inputs), is_causal=is_causal)[0],
          reference.attention_gauge(*floats(*inputs), is_causal=is_causal), 4)


def heads_value(split):
    x = normal(2, 3, 8)
    same_bits(nn.split_heads(cmha.tensor(x), 2), split(x, 2))


def softmax_value(softmax):
    x = (50 * normal(5, 37)).astype(np.float32)
    with np.errstate(all="ignore"):
        expected = softmax(x)
    check(cmha.tensor(x).softmax(), expected, cases.of_softmax(*floats(reference.softmax(x.astype(np.float64)), x)), 2)


def gelu_value(gelu):
    x = normal(5, 37)
    check(cmha.tensor(x).gelu(), gelu(x.astype(np.float64)), abs(x), 2)


def norm_value(layer_norm):
    x, gamma, beta = normal(3, 7) * np.float32(0.01), normal(7, seed=1), normal(7, seed=2)
    got = make(cmha.ops.layer_norm, *map(cmha.tensor, (x, gamma, beta)))
    check(got, layer_norm(*floats(x, gamma, beta)), cases.of_layer_norm(0, *floats(x, gamma, beta)), 4)


def variance_value(var):
    x = normal(3, 101)
    check(cmha.tensor(x).var(axis=1), var(x.astype(np.float64)), x.astype(np.float64).var(axis=1) * 11, 4)


def loss_value(cross_entropy):
    logits, targets = normal(7, 5), np.array([0, 4, -1, 2, -1, 1, 3])
    got = cmha.cross_entropy(cmha.tensor(logits), cmha.tensor(targets))
    check(got, cross_entropy(logits.astype(np.float64), targets), 10, 2)


def product_value(matmul, M=3, K=37, N=33):
    a, b = normal(M, K), normal(K, N, seed=1)
    got = matmul(cmha.tensor(a), cmha.tensor(b))
    check(got, np.matmul(*floats(a, b)), cases.of_matmul(0, *floats(a, b)), 1)


def sum_value(total):
    x = abs(normal(3, 37))
    check(cmha.tensor(x).sum(axis=1), total(x.astype(np.float64)), np.sqrt(37) * x.sum(axis=1), 1)


def gradient_of(name, formula, *shapes, **options):
    """A check of the gradient of op `name`, whose function the trial wraps."""
    def run(wrap):
        wrong = wrap(getattr(cmha.ops, name))
        inputs = [s if isinstance(s, np.ndarray) else normal(*s, seed=i) for i, s in enumerate(shapes)]
        gradcheck(lambda *t: make(wrong, *t, **options), formula, inputs)

    return run


def changed_vjp(change):
    """The op with change(dy, gradients, arrays) in place of its gradients."""
    def wrap(function):
        def wrong(*arrays, **options):
            y, vjp = function(*arrays, **options)
            return y, lambda dy: tuple(change(dy, vjp(dy), arrays))

        wrong.__name__ = function.__name__
        return wrong

    return wrap


def tied_gradient(spoil):
    gpt, tokens, targets = tiny(), ids(2, 8), ids(2, 8, seed=1)
    gpt(tokens, targets)[1].backward()
    gradient = {name: array(p.grad).astype(np.float64) for name, p in gpt.named_parameters()}
    check_model_gradient(weights64(gpt), spoil(gpt, tokens, targets, gradient), tokens, targets, n=3)


def cached_logits(second_position):
    gpt, tokens = tiny(), ids(1, 7)
    cache, w = gpt.new_cache(1), weights64(gpt)
    with no_grad():
        gpt(tokens[:, :1], cache=cache)
        got = array(gpt(tokens[:, 1:], cache=cache))[:, -1]
    wpe = w["wpe.weight"].copy()
    wpe[1:7] = w["wpe.weight"][second_position:second_position + 6]
    expected = reference.gpt(w | {"wpe.weight": wpe}, tokens, 2, 2)[:, -1]
    check(got, expected, abs(expected).max() * math.sqrt(2), 16)


def same(formula):
    return formula


# --- wrong formulas -------------------------------------------------------------------------------------------------

def unscaled(q, k, v, **options):
    return reference.attention(q, k, v, scale=1.0, **options)


def off_by(n):
    def attention(q, k, v, is_causal):
        mask = np.tril(np.ones((q.shape[2], k.shape[2]), bool), k.shape[2] - q.shape[2] + n)
        return reference.attention(q, k, v, mask=mask)

    return attention


def top_left(q, k, v, is_causal):
    return reference.attention(q, k, v, mask=np.tril(np.ones((q.shape[2], k.shape[2]), bool)))


def one_head_twice(q, k, v, **options):
    v = v.copy()
    v[:, 1] = v[:, 0]
    return reference.attention(q, k, v, **options)


def no_max(x):
    e = np.exp(x)
    return e / e.sum(axis=-1, keepdims=True)


def erf_gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def no_eps(x, gamma, beta):
    return reference.layer_norm(x, gamma, beta, eps=0.0)


def mean_of_all(logits, targets):
    return reference.cross_entropy(logits, targets) * (targets != -1).mean()


def without_last_column(a, b):
    y = array(a @ b)
    y[:, -1] = 0
    return y


def half_precision(a, b):
    return a @ cmha.tensor(array(b).astype(np.float16))


def no_bias_correction(p, m, v, g, step, lr, **options):
    return reference.adamw(p, m, v, g, 10**9, lr, **options)


def decay_in_gradient(p, m, v, g, step, lr, weight_decay):
    return reference.adamw(p, m, v, g + weight_decay * p, step, lr, weight_decay=0.0)


def eps_inside_root(p, m, v, g, step, lr, weight_decay):
    return reference.adamw(p, m, v, g, step, lr, weight_decay=weight_decay, eps=1e-4)


def gain_without_x_hat(dy, gradients, arrays):
    return gradients[0], gradients[2], gradients[2]


def norm_without_its_mean(dy, gradients, arrays):
    return _core.multiply(dy, arrays[1]), *gradients[1:]


def bias_over_columns(dy, gradients, arrays):
    return *gradients[:2], _core.sum(dy, (1,))


def weight_transposed(dy, gradients, arrays):
    return gradients[0], gradients[1].permute((1, 0)), gradients[2]


def softmax_without_second_term(dy, gradients, arrays):
    return (_core.multiply(dy, _core.softmax_forward(arrays[0], -1)),)


def keys_and_values_swapped(dy, gradients, arrays):
    return gradients[0], gradients[2], gradients[1]


def scale_forgotten(dy, gradients, arrays):
    return _core.multiply(gradients[0], _core.full((), 2.0)), *gradients[1:]


def mean_without_count(dy, gradients, arrays):
    return (_core.multiply(gradients[0], _core.full((), 5.0)),)


def last_id_wins(dy, gradients, arrays):
    dw, d = np.array(gradients[0].dense()), np.asarray(dy)
    for i, row in zip(np.asarray(arrays[1]), d, strict=True):
        dw[i] = row
    return _core.copy(_core.from_buffer(dw)), None


def counted_once(gpt, tokens, targets, gradient):
    """The embedding's use of the tied table alone: what flows into wte through the logits is left out."""
    w = weights64(gpt)
    table = np.zeros_like(gradient["wte.weight"])
    for place in np.ndindex(table.shape):
        moved = [w["wte.weight"].copy() for _ in range(2)]
        moved[0][place] += 1e-5
        moved[1][place] -= 1e-5
        untied = w | {"lm_head.weight": w["wte.weight"]}
        plus, minus = (reference.gpt_loss(untied | {"wte.weight": m}, tokens, targets, 2, 2) for m in moved)
        table[place] = (plus - minus) / 2e-5
    return gradient | {"wte.weight": table}


ATTEND = {"scale": 0.5, "is_causal": True}
QKV = ((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4))


def attention_formula(q, k, v):
    return reference.attention(q, k, v, **ATTEND)[0]


MUTATIONS = {
    "no 1/sqrt(hd)": (attention_value, reference.attention, unscaled),
    "mask one too wide": (attention_value, off_by(0), off_by(1)),
    "mask one too narrow": (attention_value, off_by(0), off_by(-1)),
    "causal aligned to the first key": (attention_value, reference.attention, top_left),
    "one head's v used twice": (attention_value, reference.attention, one_head_twice),
    "permute left out of the split": (heads_value, reference.split_heads, lambda x, n: x.reshape(4, 3, 4)),
    "permute axes swapped": (heads_value, reference.split_heads,
                             lambda x, n: x.reshape(2, 3, 2, 4).transpose(2, 0, 1, 3).reshape(4, 3, 4)),
    "softmax without its maximum": (softmax_value, lambda x: reference.softmax(x.astype(np.float64)), no_max),
    "GELU's erf form": (gelu_value, reference.gelu, erf_gelu),
    "layer norm without eps": (norm_value, reference.layer_norm, no_eps),
    "variance over N - 1": (variance_value, lambda x: x.var(axis=1), lambda x: x.var(axis=1, ddof=1)),
    "loss averaged over ignored rows": (loss_value, reference.cross_entropy, mean_of_all),
    "last column of the tail dropped": (product_value, lambda a, b: a @ b, without_last_column),
    "matmul of halves": (product_value, lambda a, b: a @ b, half_precision),
    "last element of the tail dropped": (sum_value, lambda x: x.sum(axis=1), lambda x: x[:, :-1].sum(axis=1)),
    "Adam without bias correction": (check_adamw, reference.adamw, no_bias_correction),
    "decay inside the gradient": (check_adamw, reference.adamw, decay_in_gradient),
    "Adam's eps in the wrong size": (check_adamw, reference.adamw, eps_inside_root),
    "position off by one behind the cache": (cached_logits, 1, 0),
    "tied gradient counted once": (tied_gradient, lambda gpt, tokens, targets, gradient: gradient, counted_once),
    "gain gradient without x-hat": (gradient_of("layer_norm", reference.layer_norm, (3, 7), (7,), (7,)), same,
                                    changed_vjp(gain_without_x_hat)),
    "norm gradient without its means": (gradient_of("layer_norm", reference.layer_norm, (3, 7), (7,), (7,)), same,
                                        changed_vjp(norm_without_its_mean)),
    "bias gradient over the wrong axis": (gradient_of("linear", reference.linear, (5, 3), (3, 5), (5,)), same,
                                          changed_vjp(bias_over_columns)),
    "weight gradient transposed": (gradient_of("linear", reference.linear, (7, 5), (5, 5), (5,)), same,
                                   changed_vjp(weight_transposed)),
    "softmax gradient without its second term": (gradient_of("softmax", reference.softmax, (3, 7)), same,
                                                 changed_vjp(softmax_without_second_term)),
    "gradients of k and v swapped": (gradient_of("attention", attention_formula, *QKV, **ATTEND), same,
                                     changed_vjp(keys_and_values_swapped)),
    "scale missing in attention's backward": (gradient_of("attention", attention_formula, *QKV, **ATTEND), same,
                                              changed_vjp(scale_forgotten)),
    "mean's gradient without 1/n": (gradient_of("mean", lambda x: x.mean(axis=1), (3, 5), axes=(1,)), same,
                                    changed_vjp(mean_without_count)),
    "repeated ids overwrite instead of adding": (
        gradient_of("embedding", reference.embedding, (5, 3), np.array([1, 4, 1, 1, 2])), same,
        changed_vjp(last_id_wins)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_right_formula_passes_and_the_wrong_one_is_caught(name):
    examine, right, wrong = MUTATIONS[name]
    examine(right)
    with pytest.raises(AssertionError):
        examine(wrong)


def test_there_are_enough_of_them():
    assert len(MUTATIONS) >= 20
