"""pickle and copy: of each thing a user holds, with every protocol, and tied weights stay tied."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest

import cmha
from cmha import nn

from .checking import counting, leaf, rude, same_bits
from .models import ids, same_model, tiny

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def pickled(protocol):
    return pytest.param(lambda x: pickle.loads(pickle.dumps(x, protocol)), id=f"protocol {protocol}")


def apart(x):
    """Through protocol 5 with the buffers on their own."""
    buffers = []
    stream = pickle.dumps(x, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=buffers)


WAYS = [*map(pickled, PROTOCOLS), pytest.param(apart, id="out of band"), pytest.param(copy.deepcopy, id="deepcopy")]


def shares(x, y):
    return np.shares_memory(x.detach().numpy(), y.detach().numpy())


# --- tensors --------------------------------------------------------------------------------------------------------

TENSORS = {
    "float32": cmha.tensor(counting(2, 3)), "int64": cmha.tensor([[1, -(2**40)]]), "bool": cmha.tensor([True, False]),
    "number": cmha.tensor(2.5), "empty": cmha.zeros(2, 0, 3),
    "permuted": cmha.tensor(counting(2, 3, 4)).permute(2, 0, 1),
    "sliced": cmha.tensor(counting(7, 5))[::-2, 1:4], "expanded": cmha.tensor(counting(1, 3)).expand(4, 3),
    "nan": cmha.tensor([np.nan, -0.0, np.inf]), "from outside": cmha.from_numpy(counting(3)),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TENSORS)
def test_tensor(name, way):
    x = TENSORS[name]
    y = way(x)
    assert type(y) is cmha.Tensor and y.shape == x.shape and y.dtype == x.dtype and y.requires_grad is False
    same_bits(y, x)


@pytest.mark.parametrize("way", WAYS)
def test_leaf_with_its_gradient(way):
    x = leaf(counting(2, 3))
    (x * x).sum().backward()
    y = way(x)
    assert y.requires_grad and not shares(y, x) and not y.data.shared
    same_bits(y, x)
    same_bits(y.grad, x.grad)
    y.grad = None
    cmha.AdamW([y], lr=0.1)
    (y * 3).sum().backward()
    assert y.grad.tolist() == [[3] * 3] * 2 and x.grad.tolist() == [[0, 2, 4], [6, 8, 10]]


@pytest.mark.parametrize("way", WAYS)
def test_a_computed_tensor_is_refused(way):
    x = leaf(counting(3))
    with pytest.raises(RuntimeError, match=r"history of a computed tensor.*result of multiply, expected detach\(\)"):
        way(x * 2)
    same_bits(way((x * 2).detach()), x.detach() * 2)


def test_out_of_band_nothing_large_is_copied():
    x, parameter = cmha.tensor(counting(100, 100)), leaf(counting(100, 100))
    buffers = []
    stream = pickle.dumps([x, parameter], protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 1000 and [memoryview(b).nbytes for b in buffers] == [40_000, 40_000]
    y, own = pickle.loads(stream, buffers=buffers)
    assert shares(y, x) and y.data.shared
    assert not shares(own, parameter) and not own.data.shared  # an optimiser writes it: one copy
    y, _ = pickle.loads(stream, buffers=[bytes(b) for b in buffers])  # from a socket
    same_bits(y, x)
    for protocol in PROTOCOLS:
        assert not pickle.loads(pickle.dumps(x, protocol)).data.shared


def test_a_slice_takes_only_itself_along():
    row = cmha.tensor(counting(1000, 10))[3]
    assert len(pickle.dumps(row)) < 500


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tensor_twice_stays_one(way):
    x = leaf(counting(3))
    first, second = way([x, x])
    assert first is second


def test_copy_is_on_the_same_memory():
    x = leaf(counting(3))
    x.grad = cmha.ones(3)
    y = copy.copy(x)
    assert y is not x and shares(x, y) and y.requires_grad and y.grad is x.grad
    y.sum().backward()
    assert x.grad.tolist() == [1, 1, 1] and y.grad.tolist() == [2, 2, 2]
    z = copy.copy(x * 2)
    z.sum().backward()
    assert x.grad.tolist() == [3, 3, 3]


def test_lent_memory_is_copied_as_it_is():
    x = cmha.tensor(counting(3))
    view = rude(x)
    y = copy.deepcopy(x)
    view[:] = 7
    assert y.tolist() == [0, 1, 2] and not y.data.shared and copy.copy(x).tolist() == [7, 7, 7]


# --- models, optimisers ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("way", WAYS)
def test_model(way):
    gpt = tiny(dropout=0.25)
    gpt.train()
    other = way(gpt)
    same_model(gpt, other)
    assert other.cfg == gpt.cfg and other.training and len(other.parameters()) == len(gpt.parameters())
    assert not any(shares(p, q) for p, q in zip(gpt.parameters(), other.parameters(), strict=True))
    gpt.eval()
    other.eval()
    same_bits(other(ids(2, 5)), gpt(ids(2, 5)))
    assert np.array_equal(other.generate(ids(1, 3), 4, seed=0), gpt.generate(ids(1, 3), 4, seed=0))


class Tied(nn.Module):
    def __init__(self):
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight


@pytest.mark.parametrize("way", WAYS)
def test_tied_weights_stay_tied(way):
    other = way(Tied())
    assert other.b.weight is other.a.weight and len(other.parameters()) == 3
    (other.a(cmha.ones(1, 3)) + other.b(cmha.ones(1, 3))).sum().backward()
    assert other.a.weight.grad.tolist() == [[2] * 3] * 3


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_with_the_same_bits(way):
    """Model and optimiser together, between two steps, with gradients in place."""

    def step(gpt, opt):
        gpt.zero_grad()
        gpt(ids(2, 5), ids(2, 5, seed=1))[1].backward()
        opt.step()

    gpt = tiny()
    opt = cmha.AdamW(cmha.train.parameter_groups(gpt, 0.1), lr=0.01)
    step(gpt, opt)
    gpt(ids(2, 5), ids(2, 5, seed=2))[1].backward()
    other, other_opt = way((gpt, opt))
    assert {*map(id, other_opt.params)} == {*map(id, other.parameters())}
    for p, q in zip(gpt.parameters(), other.parameters(), strict=True):
        same_bits(p.grad, q.grad)
    for model, optimiser in ((gpt, opt), (other, other_opt)):
        optimiser.step()
        step(model, optimiser)
    same_model(gpt, other)


def test_copy_of_a_model_shares_its_parameters():
    gpt = tiny()
    other = copy.copy(gpt)
    assert all(p is q for p, q in zip(gpt.parameters(), other.parameters(), strict=True))


# --- caches ---------------------------------------------------------------------------------------------------------

COPIES = [*WAYS, pytest.param(copy.copy, id="copy")]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("lengths", [[3, 3], [3, 1]])
def test_kv_cache(way, lengths):
    rng = np.random.default_rng(0)

    def draw(n):
        return [rng.standard_normal((2, 3, n, 4)).astype(np.float32) for _ in "kv"]

    cache = cmha.KVCache(2, 3, 4, 6)
    cache.append(*draw(3))
    cache.truncate(lengths)
    other = way(cache)
    k, v = draw(2)
    for mine, yours in zip(cache.append(k, v), other.append(k, v), strict=True):
        for row, n in enumerate(lengths):
            same_bits(mine[row, :, : n + 2], yours[row, :, : n + 2])
    other.truncate(0)
    assert cache.lengths.tolist() == [n + 2 for n in lengths] and other.lengths.tolist() == [0, 0]
    assert repr(way(cache)) == repr(cache) and type(other) is cmha.KVCache


@pytest.mark.parametrize("way", COPIES)
def test_the_cache_of_a_model_goes_on(way):
    gpt = tiny()
    cache = gpt.new_cache(2)
    gpt(ids(2, 3), cache=cache)
    other = way(cache)
    same_bits(gpt(ids(2, 2, seed=1), cache=cache), gpt(ids(2, 2, seed=1), cache=other))
    assert len(cache) == len(other) == 5 and all(layer.lengths is other.lengths for layer in other.layers)
    other.truncate(1)
    assert len(cache) == 5
    assert way(cache.row(1)).batch_size == 1


def test_memory_that_was_never_written_is_not_pickled():
    cache = cmha.KVCache(1, 1, 4, 100_000)
    cache.append(cmha.ones(1, 1, 2, 4), cmha.ones(1, 1, 2, 4))
    assert len(pickle.dumps(cache)) < 2000


# --- the rest -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("way", COPIES)
def test_configuration_and_tokenizers(way):
    cfg = cmha.GPTConfig.tiny(dropout=0.5)
    assert way(cfg) == cfg and hash(way(cfg)) == hash(cfg)
    for tokenizer in (cmha.CharTokenizer("abc de"), cmha.ByteTokenizer()):
        other = way(tokenizer)
        assert other.encode("abed") == tokenizer.encode("abed") and other.decode(other.encode("cab")) == "cab"


@pytest.mark.parametrize("way", COPIES)
def test_bpe_tokenizer(way, tmp_path):
    pytest.importorskip("tokenizers")
    text = tmp_path / "text.txt"
    text.write_text("low lower lowest newer newest\n" * 3, encoding="utf-8")
    backend = cmha.BPETokenizer.train([text], 280)._backend
    backend.add_special_tokens(["<|endoftext|>"])
    tokenizer = cmha.BPETokenizer(backend)
    text = "lowest newer <|endoftext|>"
    assert tokenizer.encode(text) != tokenizer.encode(text, allow_special=True)
    other = way(tokenizer)
    assert other.vocab_size == tokenizer.vocab_size and other.special_tokens == tokenizer.special_tokens
    for special in (False, True):
        assert other.encode(text, special) == tokenizer.encode(text, special)
    assert other.decode(other.encode("lower é")) == "lower é"


def double(x):
    return (x * 2).detach()


def test_spawned_processes_take_and_give_tensors():
    x = cmha.tensor(counting(3, 4)).T
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        same_bits(pool.apply_async(double, (x,)).get(timeout=60), counting(3, 4).T * 2)
