"""Memory that is lent through DLPack may be written by others: then the gradient is right, or there is an error."""

import gc

import numpy as np
import pytest

import cmha
from cmha import _core, nn
from cmha.nn.recompute import recompute

from .cases import CASES
from .checking import array, counting, gradients, leaf, rude, ruin, same_bits
from .models import ids, tiny

DIFFERENTIABLE = [
    pytest.param(c, next(s for s in c.shapes if all(map(np.prod, s))), id=c.name) for c in CASES if c.gradient
]


@pytest.mark.parametrize("case, shapes", DIFFERENTIABLE)
def test_written_between_forward_and_backward(case, shapes):
    """Every op: an input or a result that is lent after the forward pass and written. And nothing is wrong if not."""
    inputs = case.inputs(shapes)

    def run(meddle):
        tensors = [leaf(a) for a in inputs]
        y = case.call(*tensors)
        meddle([*tensors, y])
        dy = np.random.default_rng(4).standard_normal(y.shape).astype(np.float32)
        try:
            y.backward(dy)
        except RuntimeError as error:
            assert "was changed in place" in str(error)
            return None
        return [None if t.grad is None else array(t.grad) for t in tensors]

    right = run(lambda tensors: None)
    reading = run(lambda tensors: [np.from_dlpack(t.detach()).sum() for t in tensors])
    assert reading is not None
    for a, b in zip(right, reading, strict=True):
        same_bits(a, b)
    for i in range(len(inputs) + 1):
        for held in (True, False):  # lent still in backward, or given back before

            def write(tensors, i=i, held=held):
                view = ruin(tensors[i].detach())
                return view if held else None

            got = run(write)
            for a, b in zip(right, got or right, strict=True):
                same_bits(a, b)


def test_the_error_comes_only_where_the_value_is_needed():
    def loss(y, written):
        ruin(written.detach())
        y.sum().backward()

    x = leaf(counting(3))
    h = x * 2
    loss(h + 1, h)
    assert x.grad.tolist() == [2, 2, 2]
    x, other = leaf(counting(3)), leaf(counting(3))
    loss(x * other, cmha.tensor(counting(3)))  # memory that has nothing to do with it
    x, other = leaf(counting(3)), leaf(counting(3))
    y, z = x * other, x.exp()
    for product, written in ((y, other), (z, z)):
        x.grad = None
        with pytest.raises(RuntimeError, match=r"\(3,\) that \[(multiply|exp)\] needs was changed in place"):
            loss(product, written)
        assert x.grad is None


@pytest.mark.parametrize("case, shapes", DIFFERENTIABLE)
@pytest.mark.parametrize("how", ["lent", "from_dlpack", "from_numpy"])
def test_lent_before_forward_and_written_after_it(case, shapes, how):
    """The gradient is that of the values at forward."""
    inputs = case.inputs(shapes)
    tensors = [leaf(a) for a in inputs]
    y = case.call(*tensors)
    dy = np.random.default_rng(4).standard_normal(y.shape).astype(np.float32)
    right = gradients(case.call, tensors, dy)
    if how == "lent":
        tensors = [leaf(a) for a in inputs]
        outside = [rude(t.detach()) for t in tensors]
    else:
        outside = [np.array(a, a.dtype) for a in inputs]
        tensors = [getattr(cmha, how)(a) for a in outside]
        for t in tensors:
            t.requires_grad = t.dtype == "float32"
    y = case.call(*tensors)
    for view in outside:
        view[...] = ~view if view.dtype == bool else view + 1
    y.backward(dy)
    for t, expected in zip([t for t in tensors if t.requires_grad], right, strict=True):
        same_bits(t.grad, expected)


@pytest.mark.parametrize("kind", ["float", "bool", "key"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_mask_that_is_written_after_forward(kind, when, fused):
    rng = np.random.default_rng(0)
    mha = nn.MultiHeadAttention(6, 2)
    mha.fused = fused
    a = rng.standard_normal((2, 5, 6)).astype(np.float32)
    mask = {"float": rng.standard_normal((5, 5)).astype(np.float32), "bool": np.tri(5, dtype=bool),
            "key": np.array([[True] * 4 + [False], [True] * 5])}[kind]  # fmt: skip
    name = "key_mask" if kind == "key" else "mask"

    def run(meddle_before, meddle_after):
        x, m = leaf(a), cmha.tensor(mask)
        view = meddle_before(m)
        y = mha(x, **{name: m})
        if view is not None:
            view[...] = ~view if view.dtype == bool else 5
        view = meddle_after(m)
        try:
            y.backward(np.ones(y.shape, np.float32))
        except RuntimeError as error:
            assert "changed in place" in str(error)
            return None
        return array(x.grad)

    right = run(lambda m: None, lambda m: None)
    got = run(rude, lambda m: None) if when == "before" else run(lambda m: None, ruin)
    assert got is not None or when == "after"
    if got is not None:
        same_bits(got, right)


@pytest.mark.parametrize("when", ["before", "after"])
def test_recomputed_activations_do_not_read_what_was_written(when):
    rng = np.random.default_rng(0)
    mlp, a = nn.MLP(6), rng.standard_normal((3, 6)).astype(np.float32)
    x = leaf(a)
    mlp(x).sum().backward()
    right = [array(t.grad) for t in (x, *mlp.parameters())]
    mlp.zero_grad()
    x = leaf(a)
    view = rude(mlp.c_fc.weight.detach()) if when == "before" else None
    loss = recompute(mlp, x).sum()
    view = rude(mlp.c_fc.weight.detach()) if view is None else view
    view[...] = 3
    if when == "after":
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()
        assert x.grad is None
    else:
        loss.backward()
        for t, expected in zip((x, *mlp.parameters()), right, strict=True):
            same_bits(t.grad, expected)


def test_a_gradient_does_not_stay_on_memory_from_outside():
    g = np.ones((2, 3), np.float32)
    x = leaf(counting(6))
    x.reshape(2, 3).backward(cmha.from_numpy(g))
    g[:] = 7
    assert x.grad.tolist() == [1] * 6
    x = leaf(counting(6))
    x.backward(cmha.from_numpy(np.ones(6, np.float32)))
    assert not x.grad.data.shared


def test_memory_given_back_is_kept_by_ops_as_before():
    """No copies for ever: the mark goes with the last borrower."""
    x = leaf(counting(4))
    first, second = np.from_dlpack(x.detach()), np.from_dlpack(x.detach()[1:])
    assert x.data.shared and cmha.from_dlpack(x.detach()).data.shared
    del first
    assert x.data.shared
    del second
    gc.collect()
    assert not x.data.shared
    version = x.data.version
    view = np.from_dlpack(x.detach())
    del view
    assert x.data.version == version
    ruin(x.detach())
    gc.collect()
    assert x.data.version > version


def test_every_byte_counts():
    """A write of one bit anywhere in lent memory is seen."""
    x = cmha.tensor(np.zeros(1003, bool))
    view = rude(x)
    for i in (0, 1, 7, 8, 31, 32, 500, 1000, 1002):
        before = x.data.version
        view[i] = True
        assert x.data.version > before
        assert x.data.version == x.data.version
    before = x.data.version
    view[1], view[2] = False, True  # two that trade places
    assert x.data.version > before


def test_optimiser_and_loading_write_what_was_lent():
    linear = nn.Linear(3, 2, bias=False)
    view = np.from_dlpack(linear.weight.detach())
    opt = cmha.AdamW(linear.parameters(), lr=0.1)
    before = view.copy()
    linear(cmha.ones(1, 3)).sum().backward()
    opt.step()
    assert not np.array_equal(view, before) and np.array_equal(view, array(linear.weight))
    linear.load_state_dict({"weight": counting(3, 2)})
    assert np.array_equal(view, counting(3, 2))
    loss = linear(cmha.ones(1, 3).detach()).sum()
    opt.step()
    loss.backward()  # the ops kept copies, as the weight is lent


def test_a_training_step_with_lent_weights_has_the_same_bits():
    results = []
    for lend in (False, True):
        gpt = tiny()
        outside = [np.from_dlpack(p) for p in gpt.state_dict().values()] if lend else None
        opt = cmha.AdamW(gpt.parameters(), lr=0.1)
        for seed in range(2):
            gpt.zero_grad()
            gpt(ids(2, 5), ids(2, 5, seed=seed))[1].backward()
            opt.step()
        results.append([array(p) for p in gpt.parameters()])
        for a, p in zip(outside or [], gpt.parameters(), strict=lend):
            same_bits(a, p)
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


def test_lending_knows_read_only_sources():
    a = counting(2)
    a.flags.writeable = False
    assert memoryview(_core.lend(_core.from_buffer(a))).readonly
    assert not memoryview(_core.lend(_core.from_buffer(counting(2)))).readonly


def test_torch_writes_between_forward_and_backward():
    torch = pytest.importorskip("torch")
    x = leaf(counting(3))
    loss = (x * x).sum()
    there = torch.from_dlpack(x.detach())
    loss.backward()                                         # nobody wrote
    assert x.grad.tolist() == [0, 2, 4]
    loss = (x * x).sum()
    there.mul_(10)                                          # lent before: the ops kept what was there
    x.grad = None
    loss.backward()
    assert x.grad.tolist() == [0, 2, 4] and x.tolist() == [0, 10, 20]
    del there
    loss = x.exp().sum()
    torch.from_dlpack(x.detach()).zero_()                   # lent after
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
    t = torch.arange(3.0)
    x = cmha.from_dlpack(t)
    x.requires_grad = True
    loss = (x * x).sum()
    t.mul_(10)
    loss.backward()
    assert x.grad.tolist() == [0, 2, 4]
    linear = nn.Linear(3, 2)
    weight = torch.from_dlpack(linear.weight.detach())
    linear(cmha.ones(1, 3)).sum().backward()
    cmha.AdamW(linear.parameters(), lr=0.5).step()
    assert np.array_equal(weight.numpy(), array(linear.weight))
