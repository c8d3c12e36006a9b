"""The oracle: every public operation in float64 NumPy, each written from its definition and not from the package.

Where NumPy already has the operation under that meaning, tests/cases.py names NumPy's. A function takes and returns
float64 arrays (ids and targets int64, masks bool). Nothing here is fast, and nothing is allowed to be clever.
"""

import numpy as np

INFINITY = float("inf")


# --- elementwise ----------------------------------------------------------------------------------------------------

def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def relu(x):
    return np.where(x > 0, x, 0.0)


def gelu(x):
    """GPT-2's form: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); 0 at -inf, its limit there."""
    return np.where(x == -INFINITY, 0, 0.5 * x) * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def masked_fill(x, mask, value):
    return np.where(mask, value, x)


# --- along an axis --------------------------------------------------------------------------------------------------

def softmax(x, axis=-1):
    """A row of -inf only is a row of zeros."""
    top = np.max(x, axis=axis, keepdims=True, initial=-INFINITY)
    e = np.exp(x - np.where(np.isfinite(top), top, 0))
    total = e.sum(axis=axis, keepdims=True)
    return e / np.where(total == 0, 1, total)


def log_softmax(x, axis=-1):
    x = x - x.max(axis=axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=axis, keepdims=True))


def cross_entropy(logits, targets, ignore_index=-1):
    """Mean over the counted targets; none counted: 0."""
    rows, targets = log_softmax(logits.reshape(-1, logits.shape[-1])), targets.reshape(-1)
    counted = np.flatnonzero(targets != ignore_index)
    return -rows[counted, targets[counted]].sum() / max(len(counted), 1)


def layer_norm(x, gamma, beta=0.0, eps=1e-5):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float64(np.float32(eps))) * gamma + beta


def philox(seed, stream, block):
    """Philox 4x32-10 (Salmon et al. 2011): four 32-bit numbers for each block number of an array."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    block = np.asarray(block, dtype=np.uint64)
    c = [block & low, block >> half, np.full_like(block, stream & 0xFFFFFFFF), np.full_like(block, stream >> 32)]
    for i in range(10):
        k0, k1 = (seed + i * 0x9E3779B9) & 0xFFFFFFFF, ((seed >> 32) + i * 0xBB67AE85) & 0xFFFFFFFF
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> half) ^ c[1] ^ np.uint64(k0), p1 & low, (p0 >> half) ^ c[3] ^ np.uint64(k1), p0 & low]
    return np.stack(c, axis=-1)


def dropout_factors(n, p, seed, stream, first=0):
    """0 where the draw of element first + i is below p, else 1 / (1 - p)."""
    index = np.arange(first, first + n, dtype=np.uint64)
    draws = philox(seed, stream, index >> np.uint64(2))[np.arange(n), (index & np.uint64(3)).astype(int)]
    p = np.float64(np.float32(p))
    return np.where(draws < np.uint64(p * 2**32), 0.0, 1 / (1 - p))


def dropout(x, p, seed, stream, first=0):
    return x * dropout_factors(x.size, p, seed, stream, first).reshape(x.shape)


# --- layers ---------------------------------------------------------------------------------------------------------

def linear(x, w, b=0.0):
    return x @ w + b


def embedding(weight, ids):
    return weight[ids]


def split_heads(x, n_head):
    """(B, T, D) -> (B*H, T, hd), head by head: head h is columns h*hd .. (h+1)*hd."""
    B, T, D = x.shape
    hd = D // n_head
    return np.stack([x[b, :, h * hd:(h + 1) * hd] for b in range(B) for h in range(n_head)])


def merge_heads(x, n_head):
    """(B*H, T, hd) -> (B, T, D)."""
    rows = [np.concatenate(list(x[b:b + n_head]), axis=-1) for b in range(0, len(x), n_head)]
    return np.stack(rows)


def causal_mask(T, S=None):
    """True where query i of T, the last of which is the last of S keys, may see key j."""
    S = T if S is None else S
    return np.array([[j <= i + S - T for j in range(S)] for i in range(T)], dtype=bool).reshape(T, S)


def visible_keys(shape, mask=None, is_causal=False, key_mask=None, lengths=None):
    """(B, H, T, S) bool: which key each query may read."""
    B, _H, T, S = shape
    visible = np.ones(shape, dtype=bool)
    if mask is not None:
        visible &= mask if mask.dtype == bool else mask != -INFINITY
    if key_mask is not None:
        visible &= key_mask[:, None, None, :]
    lengths = np.full(B, S) if lengths is None else np.asarray(lengths)
    keys, queries = np.arange(S), np.arange(T)[:, None]
    visible &= (keys < lengths[:, None, None, None])
    if is_causal:
        visible &= keys <= queries + lengths[:, None, None, None] - T
    return visible


def attention_scores(q, k, mask=None, scale=None):
    """(B, H, T, S), before anything is hidden; also the sizes |q| |k| of what was summed."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    scores = scale * np.einsum("bhtd,bhsd->bhts", q, k)
    size = abs(scale) * np.einsum("bhtd,bhsd->bhts", abs(q), abs(k))
    if mask is not None and mask.dtype != bool:
        finite = np.where(mask == -INFINITY, 0, mask)
        scores, size = scores + finite, size + abs(finite)
    return scores, size


def attention(q, k, v, mask=None, is_causal=False, scale=None, key_mask=None, lengths=None, dropout=1.0):
    """-> y (B, H, T, hd), weights (B, H, T, S). Hidden keys are skipped, a query that sees nothing gives zeros.

    dropout: the factors (B, H, T, S) of the weights in y; the weights that are returned are those before."""
    with np.errstate(invalid="ignore"):
        scores, _ = attention_scores(q, k, mask, scale)
        visible = visible_keys(scores.shape, mask, is_causal, key_mask, lengths)
        weights = softmax(np.where(visible, scores, -INFINITY))
        v = np.repeat(v, q.shape[1] // v.shape[1], axis=1)
        y = np.where(visible[..., None], (weights * dropout)[..., None] * v[:, :, None], 0).sum(axis=3)
    return y, weights


def attention_gauge(q, k, v, mask=None, is_causal=False, scale=None, key_mask=None, lengths=None):
    """N6: (4 + sqrt(n) + s) sum_j p_j |v_j|, n visible keys, s the largest sum of |q| |k| among them."""
    _, weights = attention(q, k, v, mask, is_causal, scale, key_mask, lengths)
    _, size = attention_scores(q, k, mask, scale)
    visible = visible_keys(size.shape, mask, is_causal, key_mask, lengths)
    s = np.where(visible, size, 0).max(axis=-1, initial=0)
    v = np.repeat(v, q.shape[1] // v.shape[1], axis=1)
    return (4 + np.sqrt(visible.sum(axis=-1)) + s)[..., None] * np.einsum("bhts,bhsd->bhtd", weights, abs(v))


def multi_head_attention(w, x, n_head, n_kv_head=None, key_value=None, **options):
    """The layer on a dict of weights c_q.weight, c_q.bias, ...; a missing bias is 0, a missing c_proj the identity."""
    n_kv_head = n_head if n_kv_head is None else n_kv_head
    memory = x if key_value is None else key_value

    def heads(name, x, n):
        y = linear(x, w[f"{name}.weight"], w.get(f"{name}.bias", 0.0))
        return y.reshape(*y.shape[:2], n, -1).transpose(0, 2, 1, 3)

    q, k, v = heads("c_q", x, n_head), heads("c_k", memory, n_kv_head), heads("c_v", memory, n_kv_head)
    y, weights = attention(q, k, v, **options)
    y = y.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
    if "c_proj.weight" in w:
        y = linear(y, w["c_proj.weight"], w.get("c_proj.bias", 0.0))
    return y, weights


# --- the model ------------------------------------------------------------------------------------------------------

def mlp(w, x):
    hidden = gelu(linear(x, w["c_fc.weight"], w.get("c_fc.bias", 0.0)))
    return linear(hidden, w["c_proj.weight"], w.get("c_proj.bias", 0.0))


def under(w, prefix):
    """The part of a dict of weights below a prefix, the prefix taken off."""
    return {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}


def gpt(w, ids, n_layer, n_head, first_position=0):
    """GPT-2's logits (B, T, V): embeddings, pre-norm blocks, final norm, the embedding table again."""
    def norm(x, name):
        return layer_norm(x, w[f"{name}.weight"], w.get(f"{name}.bias", 0.0))

    x = w["wte.weight"][ids] + w["wpe.weight"][first_position:first_position + ids.shape[1]]
    for i in range(n_layer):
        block = f"h.{i}."
        x = x + multi_head_attention(under(w, block + "attn."), norm(x, block + "ln_1"), n_head, is_causal=True)[0]
        x = x + mlp(under(w, block + "mlp."), norm(x, block + "ln_2"))
    return norm(x, "ln_f") @ w.get("lm_head.weight", w["wte.weight"]).T


def gpt_loss(w, ids, targets, n_layer, n_head):
    return cross_entropy(gpt(w, ids, n_layer, n_head), targets)


# --- training -------------------------------------------------------------------------------------------------------

def adamw(p, m, v, g, step, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    """One step (1, 2, ...) of Loshchilov and Hutter 2019: decay beside the gradient, not inside it."""
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    m_hat, v_hat = m / (1 - betas[0]**step), v / (1 - betas[1]**step)
    return p - lr * weight_decay * p - lr * m_hat / (np.sqrt(v_hat) + eps), m, v
