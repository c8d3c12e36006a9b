"""Multi-head attention: the lesson's claims, masks of every kind, hidden keys, and the two paths beside each other."""

import itertools

import numpy as np
import pytest

import cmha
from cmha import MultiHeadAttention, nn

from . import reference
from .checking import EPS, array, bits, check, floats, gradcheck, leaf, same_bits

B, T, S, D, H = 2, 5, 7, 12, 3
ATTEND = cmha.scaled_dot_product_attention
INF, NAN = float("inf"), float("nan")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make(n_embd=D, n_head=H, seed=0, scale=0.5, **options):
    """A layer whose weights are larger than at initialisation, biases included, so that every term counts."""
    mha = MultiHeadAttention(n_embd, n_head, **options)
    rng = np.random.default_rng(seed)
    mha.load_state_dict({name: (scale * rng.standard_normal(t.shape)).astype(np.float32)
                         for name, t in mha.state_dict().items()})
    return mha


def weights(mha):
    return {name: array(t).astype(np.float64) for name, t in mha.state_dict().items()}


# --- the lesson's claims --------------------------------------------------------------------------------------------

def test_eight_parameters_in_order():
    mha = MultiHeadAttention(D, H)
    names = [f"c_{p}.{kind}" for p in ("q", "k", "v", "proj") for kind in ("weight", "bias")]
    assert [n for n, _ in mha.named_parameters()] == names and len(mha.parameters()) == 8
    assert [p.shape for p in mha.parameters()] == [(D, D), (D,)] * 4
    assert (mha.n_head, mha.head_dim) == (H, D // H)
    assert len(MultiHeadAttention(D, H, bias=False).parameters()) == 4
    assert len(MultiHeadAttention(D, H, output_projection=False).parameters()) == 6


def test_printing_lists_names_and_shapes():
    text = repr(MultiHeadAttention(D, H))
    for word in ("MultiHeadAttention", "c_q", "c_k", "c_v", "c_proj", "(12, 12)"):
        assert word in text


def test_column_block_h_of_w_q_is_the_projection_of_head_h():
    mha, x, hd = make(), normal(B, T, D), D // H
    heads = array(nn.split_heads(mha.c_q(cmha.tensor(x)), H)).reshape(B, H, T, hd)
    w, b = array(mha.c_q.weight), array(mha.c_q.bias)
    for h in range(H):
        block = slice(h * hd, (h + 1) * hd)
        alone = cmha.tensor(x) @ cmha.tensor(w[:, block]) + cmha.tensor(b[block])
        same_bits(heads[:, h], alone)


def test_a_head_moves_only_its_own_output():
    """Before c_proj, that is: the claim holds bit for bit."""
    mha, x, hd = make(output_projection=False), cmha.tensor(normal(B, T, D)), D // H
    before = array(mha(x))
    changed = {name: array(t) for name, t in mha.state_dict().items()}
    for name in ("c_k.weight", "c_k.bias", "c_v.weight", "c_v.bias"):
        changed[name] = changed[name].copy()
        changed[name][..., hd:2 * hd] += 1
    mha.load_state_dict(changed)
    after = array(mha(x))
    same_bits(after[..., :hd], before[..., :hd])
    same_bits(after[..., 2 * hd:], before[..., 2 * hd:])
    assert (after[..., hd:2 * hd] != before[..., hd:2 * hd]).all()


def test_one_step_moves_all_eight_tensors():
    mha = make()
    before = [array(p) for p in mha.parameters()]
    opt = cmha.AdamW(mha.parameters(), lr=0.01, weight_decay=0.0)
    (mha(cmha.tensor(normal(B, T, D)), is_causal=True) ** 2).mean().backward()
    opt.step()
    for (name, p), old in zip(mha.named_parameters(), before, strict=True):
        assert (array(p) != old).any(), f"{name} did not move"


def test_shifting_every_key_alike_changes_no_weight():
    """Why c_k.bias moves by rounding alone: softmax does not see what is added to a whole row of scores."""
    q, k, v = normal(1, 1, 4, 3), normal(1, 1, 6, 3, seed=1), normal(1, 1, 6, 3, seed=2)
    a, b = (reference.attention(*floats(q, k + shift, v))[0] for shift in (np.float32(0), np.float32(1)))
    assert np.abs(a - b).max() < 1e-6


# --- values and gradients of the layer ------------------------------------------------------------------------------

MASKS = {
    "none": None,
    "bool 2-D": np.random.default_rng(1).random((T, T)) < 0.6,
    "float 2-D": np.where(np.random.default_rng(2).random((T, T)) < 0.3, -INF, 0.7).astype(np.float32),
    "bool 4-D": np.random.default_rng(3).random((B, 1, T, T)) < 0.6,
    "float 4-D": normal(1, H, T, T, seed=4),
    "bool (B, H, T, S)": np.random.default_rng(5).random((B, H, T, T)) < 0.6,
    "bool (1, S)": np.random.default_rng(6).random((1, T)) < 0.6,
    "float (B, 1, 1, S)": normal(B, 1, 1, T, seed=7),
}
KEY_MASK = np.array([[True] * T, [True, False, True, True, False]])
COMBINATIONS = list(itertools.product(MASKS, [False, True], [None, KEY_MASK], [True, False]))


@pytest.mark.parametrize("mask, is_causal, key_mask, fused", COMBINATIONS)
def test_every_combination_of_masks(mask, is_causal, key_mask, fused):
    mha, x = make(), normal(B, T, D)
    mha.fused = fused
    given = {"mask": MASKS[mask], "key_mask": key_mask}
    tensors = {n: None if m is None else cmha.tensor(m) for n, m in given.items()}
    y = mha(cmha.tensor(x), is_causal=is_causal, **tensors)
    z, p = mha(cmha.tensor(x), is_causal=is_causal, need_weights=True, **tensors)
    same_bits(z, y)                                     # asking for the weights changes nothing
    expected, p64 = reference.multi_head_attention(weights(mha), x.astype(np.float64), H, is_causal=is_causal, **given)
    check(y, expected, abs(expected).max() + 1, 16)
    check(p, p64, 1.0, 16)
    assert not p.requires_grad and p.shape == (B, H, T, T)
    assert np.array_equal(array(p) == 0, p64 == 0)      # a hidden key has weight 0, no other has


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": MASKS["bool 2-D"]}, {"key_mask": KEY_MASK}])
def test_gradients_of_the_layer(options, fused):
    mha, names = make(), ("x", "c_q.weight", "c_q.bias", "c_k.weight", "c_v.weight", "c_v.bias", "c_proj.weight")
    mha.fused = fused
    given = {n: cmha.tensor(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    state = {n: array(t) for n, t in mha.state_dict().items()}
    inputs = [normal(B, T, D), *(state[n] for n in names[1:])]
    tensors = [leaf(inputs[0]), *(dict(mha.named_parameters())[n] for n in names[1:])]

    def expected(x, *w):
        full = {n: a.astype(np.float64) for n, a in state.items()} | dict(zip(names[1:], w, strict=True))
        return reference.multi_head_attention(full, x, H, **options)[0]

    gradcheck(lambda x, *w: mha(x, **given), expected, inputs, tensors=tensors)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_grouped_heads(n_kv_head, fused):
    mha = make(16, 4, n_kv_head=n_kv_head)
    mha.fused = fused
    assert mha.c_k.weight.shape == (16, 4 * n_kv_head)
    x = normal(B, T, 16)
    expected, _ = reference.multi_head_attention(weights(mha), x.astype(np.float64), 4, n_kv_head, is_causal=True)
    check(mha(cmha.tensor(x), is_causal=True), expected, abs(expected).max() + 1, 16)


@pytest.mark.parametrize("fused", [True, False])
def test_cross_attention(fused):
    mha, x, memory = make(), normal(B, T, D), normal(B, S, D, seed=1)
    mha.fused = fused
    expected, _ = reference.multi_head_attention(weights(mha), *floats(x), H, key_value=memory.astype(np.float64))
    y, p = mha(cmha.tensor(x), key_value=cmha.tensor(memory), need_weights=True)
    check(y, expected, abs(expected).max() + 1, 16)
    assert p.shape == (B, H, T, S)
    source = leaf(memory)
    mha(cmha.tensor(x), key_value=source).sum().backward()
    assert source.grad.shape == memory.shape and np.abs(array(source.grad)).min() > 0


@pytest.mark.parametrize("spread", [1, 4])
def test_fused_is_no_worse_than_step_by_step(spread):
    """N6b: both within the bound, and the fused error at most twice the other's."""
    q, k, v = (normal(1, 2, 150, 8, seed=i) * np.float32(spread if i < 2 else 1) for i in range(3))
    expected, _ = reference.attention(*floats(q, k, v), is_causal=True)
    gauge = reference.attention_gauge(*floats(q, k, v), is_causal=True)
    fused = ATTEND(*map(cmha.tensor, (q, k, v)), is_causal=True)
    qt, kt, vt = (cmha.tensor(a[0]) for a in (q, k, v))
    scores = (qt @ kt.mT).mul_scalar(8**-0.5)
    mask = np.where(reference.causal_mask(150), 0, -INF).astype(np.float32)
    steps = array(scores.add(cmha.tensor(mask)).softmax_last_dim() @ vt)[None]
    check(fused, expected, gauge, 4)
    check(steps, expected, gauge, 4)
    worst = np.abs(steps - expected).max()
    assert np.abs(array(fused) - expected).max() <= 2 * worst + 4 * EPS * np.abs(v).max()


# --- hidden keys ----------------------------------------------------------------------------------------------------

def test_a_row_that_sees_nothing_is_zero():
    """B01: no 0/0, forward or backward, for a bool mask and for -inf added."""
    zeros, v = np.zeros((1, 1, 2, 2), np.float32), np.array([[[[1, 2], [3, 4]]]], np.float32)
    for mask in (np.array([[True, True], [False, False]]), np.array([[0, 0], [-INF, -INF]], np.float32)):
        q, k, values = leaf(zeros), leaf(zeros), leaf(v)
        y, p = ATTEND(q, k, values, mask=cmha.tensor(mask), need_weights=True)
        assert y.tolist() == [[[[2, 3], [0, 0]]]] and p.tolist() == [[[[0.5, 0.5], [0, 0]]]]
        y.sum().backward()
        for t in (q, k, values):
            assert np.isfinite(array(t.grad)).all()
        assert values.grad.tolist() == [[[[0.5, 0.5], [0.5, 0.5]]]] and q.grad.tolist()[0][0][1] == [0, 0]


@pytest.mark.parametrize("fused", [True, False])
def test_a_layer_row_that_sees_nothing_is_the_bias_of_c_proj(fused):
    mha, x = make(), leaf(normal(B, T, D))
    mha.fused = fused
    mask = np.ones((T, T), bool)
    mask[2] = False
    y = mha(x, cmha.tensor(mask))
    same_bits(array(y)[:, 2], np.broadcast_to(array(mha.c_proj.bias), (B, D)))
    y.sum().backward()
    assert all(np.isfinite(array(p.grad)).all() for p in [x, *mha.parameters()])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nothing_leaks_from_a_hidden_key(bad):
    """B02, N9: hidden means skipped, not multiplied by zero."""
    q, k, v = (np.array(a, np.float32).reshape(1, 1, -1, 1) for a in ([1], [1, bad], [5, bad]))
    for mask in (np.array([[True, False]]), np.array([[0, -INF]], np.float32)):
        assert ATTEND(*map(cmha.tensor, (q, k, v)), mask=cmha.tensor(mask)).item() == 5
    q, k, v = normal(2, 3, 140, 4), normal(2, 3, 140, 4, seed=1), normal(2, 3, 140, 4, seed=2)
    clean = array(ATTEND(*map(cmha.tensor, (q, k, v)), is_causal=True))
    k[:, :, 131:], v[:, :, 131:] = bad, bad
    same_bits(array(ATTEND(*map(cmha.tensor, (q, k, v)), is_causal=True))[:, :, :131], clean[:, :, :131])
    shown = np.arange(140)[None] < 131
    for mask in (shown, np.where(shown, 0, -INF).astype(np.float32)):
        tensors = [leaf(a) for a in (q, k, v)]
        y = ATTEND(*tensors, mask=cmha.tensor(mask))
        same_bits(y, ATTEND(*map(cmha.tensor, (q, k[:, :, :131], v[:, :, :131]))))
        y.sum().backward()
        assert all(np.isfinite(array(t.grad)).all() for t in tensors)
        assert (array(tensors[1].grad)[:, :, 131:] == 0).all() and (array(tensors[2].grad)[:, :, 131:] == 0).all()


def test_causal_ends_with_the_last_key():
    """B03: fewer queries than keys."""
    v = cmha.tensor(np.array([1, 2, 6], np.float32).reshape(1, 1, 3, 1))
    k = cmha.zeros((1, 1, 3, 1))
    assert ATTEND(cmha.zeros((1, 1, 1, 1)), k, v, is_causal=True).item() == 3
    check(ATTEND(cmha.zeros((1, 1, 2, 1)), k, v, is_causal=True), np.array([1.5, 3]).reshape(1, 1, 2, 1), 3, 1)
    q, k, v = normal(2, 3, 9, 4), normal(2, 3, 9, 4, seed=1), normal(2, 3, 9, 4, seed=2)
    full = array(ATTEND(*map(cmha.tensor, (q, k, v)), is_causal=True))
    for n in range(1, 10):
        same_bits(ATTEND(*map(cmha.tensor, (q[:, :, -n:], k, v)), is_causal=True), full[:, :, -n:])
    more = array(ATTEND(*map(cmha.tensor, (q, k[:, :, :4], v[:, :, :4])), is_causal=True))
    assert (more[:, :, :5] == 0).all() and np.isfinite(more).all()


def test_causal_mask_is_the_flag():
    """causal_mask(T, S) and is_causal are one thing, to the bit."""
    for n, s in ((5, 5), (2, 7), (7, 2), (1, 1)):
        mask = nn.causal_mask(n, s)
        m = array(mask)
        shown = m if m.dtype == bool else m == 0
        assert np.array_equal(shown, reference.causal_mask(n, s))
        q, k, v = normal(1, 2, n, 3), normal(1, 2, s, 3, seed=1), normal(1, 2, s, 3, seed=2)
        a, b = (ATTEND(*map(cmha.tensor, (q, k, v)), **o) for o in ({"mask": mask}, {"is_causal": True}))
        same_bits(a, b)


# --- dropout, sizes -------------------------------------------------------------------------------------------------

def test_dropout_is_off_in_eval_mode():
    """B08."""
    mha, x = make(dropout=0.5), cmha.tensor(normal(1, 8, D))
    plain = make()
    mha.eval()
    same_bits(mha(x), mha(x))
    same_bits(mha(x), plain(x))
    mha.train()
    assert bits(mha(x)) != bits(plain(x)) and bits(mha(x)) != bits(mha(x))
    cmha.manual_seed(4)
    a = mha(x)
    cmha.manual_seed(4)
    same_bits(mha(x), a)


def test_dropped_weights_are_scaled():
    """Zero or p / (1 - dropout), about as often as asked; the expectation is what it is without."""
    cmha.manual_seed(0)
    q, k = cmha.zeros((4, 4, 32, 2)), cmha.zeros((4, 4, 32, 2))
    y = array(ATTEND(q, k, cmha.ones((4, 4, 32, 2)), dropout_p=0.25))
    assert abs(y.mean() - 1) < 0.02 and y.std() > 0.01
    assert ATTEND(q, k, cmha.ones((4, 4, 32, 2)), dropout_p=1.0).sum().item() == 0


@pytest.mark.parametrize("n_embd, n_head, numbers", [(64, 0, "0"), (10, 3, "10.*3"), (0, 1, "0"), (8, -2, "-2")])
def test_sizes_that_do_not_fit(n_embd, n_head, numbers):
    """B11: an error with the numbers at fault, before anything divides."""
    with pytest.raises(ValueError, match=rf"got .*{numbers}"):
        MultiHeadAttention(n_embd, n_head)
