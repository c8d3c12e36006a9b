"""The reverse pass: order, accumulation, un-broadcasting, memory, and what a later write may not spoil."""

import gc
import threading

import numpy as np
import pytest

import cmha
from cmha import _core, nn, no_grad

from .checking import array, bits, check, gradcheck, leaf, same_bits

FAULT = (ValueError, RuntimeError)


def ones(*shape):
    return leaf(np.ones(shape, dtype=np.float32))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- order and accumulation -----------------------------------------------------------------------------------------

def test_each_node_runs_once_after_its_users():
    """B26: b = a^2 is used three times."""
    a = leaf(np.array(3.0, dtype=np.float32))
    b = a * a
    (b * b + b).backward()
    assert a.grad.item() == 114
    assert a.grad.shape == ()


@pytest.mark.parametrize("name, call, reference", [
    ("square", lambda x: x * x, lambda x: x * x),
    ("gram", lambda x: x @ x.transpose(0, 1), lambda x: x @ x.T),
    ("residual", lambda x: x + x.tanh(), lambda x: x + np.tanh(x)),
    ("diamond", lambda x: x.exp() * x.sigmoid() - x, lambda x: np.exp(x) / (1 + np.exp(-x)) - x),
    ("one input thrice", lambda x: cmha.where(x > 0, x, x * 2) / (x * x + 1),
     lambda x: np.where(x > 0, x, x * 2) / (x * x + 1)),
    ("view of a view", lambda x: x[1:, ::2].permute(1, 0).reshape(-1) * x[0, 0],
     lambda x: x[1:, ::2].T.ravel() * x[0, 0]),
])
def test_repeated_inputs(name, call, reference):
    gradcheck(call, reference, [normal(3, 5)])


def test_gradients_add_over_calls():
    x = ones(3)
    (x * 2).sum().backward()
    (x * 3).sum().backward()
    assert x.grad.tolist() == [5, 5, 5]


def test_gradient_given_to_backward():
    x = ones(2)
    (x * x).backward(cmha.tensor([1.0, 10.0]))
    assert x.grad.tolist() == [2, 20]


def test_only_leaves_that_want_one_get_a_gradient():
    x, y = ones(2), cmha.tensor([1.0, 2.0])
    z = x * y
    assert z.requires_grad and not y.requires_grad
    z.sum().backward()
    assert y.grad is None and x.grad.tolist() == [1, 2] and not x.grad.requires_grad
    assert not (y * y).requires_grad


def test_cut_off_branches():
    x = ones(2)
    y = x * 3
    (y * y.detach()).sum().backward()
    assert x.grad.tolist() == [9, 9]
    assert not y.detach().requires_grad


def test_two_backward_runs_give_the_same_bits():
    """G4."""
    found = set()
    for _ in range(3):
        x, w = leaf(normal(37, 53)), leaf(normal(53, 67, seed=1))
        ((x @ w).gelu().softmax() * (x @ w)).sum().backward()
        found.add(bits(x.grad, w.grad))
    assert len(found) == 1


# --- broadcasting and axes ------------------------------------------------------------------------------------------

def test_broadcast_operands_get_their_own_shape():
    """B28."""
    a, b = leaf(np.ones(1, np.float32)), cmha.arange(12).float().reshape(3, 4)
    (a * b).sum().backward()
    assert a.grad.shape == (1,) and a.grad.item() == 66
    for left, right in [((4, 1), (1, 4)), ((5,), (2, 3, 5)), ((3, 5), (2, 3, 5)), ((2, 1, 1, 7), (2, 3, 5, 7)),
                        ((), (2, 3))]:
        gradcheck(lambda x, y: x * y + x, lambda x, y: x * y + x, [normal(*left), normal(*right, seed=1)])
        gradcheck(lambda x, y: x / (y * y + 1), lambda x, y: x / (y * y + 1), [normal(*left), normal(*right, seed=1)])


def test_reductions_expand_along_the_right_axis():
    """B29: equal sizes would hide a transposed gradient."""
    x = ones(3, 2, 5)
    (x.mean(axis=(1, 2)) * cmha.tensor([1.0, 10.0, 100.0])).sum().backward()
    expected = np.broadcast_to(np.array([0.1, 1, 10]).reshape(3, 1, 1), (3, 2, 5))
    check(x.grad, expected, expected, 1)
    x = ones(3, 3)
    (x.sum(axis=0) * cmha.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad.tolist() == [[1, 2, 3]] * 3
    x = ones(3, 3)
    (x.sum(axis=-1) * cmha.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad.tolist() == [[1] * 3, [2] * 3, [3] * 3]
    x = ones(7)
    (x.sum(axis=-1) * 2).backward()
    assert x.grad.tolist() == [2] * 7


# --- long graphs, released graphs -----------------------------------------------------------------------------------

def test_a_chain_of_100000_nodes():
    """Backward and release are loops: no depth of recursion is involved."""
    x, zero = leaf(np.array(1.0, dtype=np.float32)), cmha.tensor(0.0)
    y = x
    for _ in range(100_000):
        y = y + zero
    y.backward()
    assert x.grad.item() == 1
    del y
    y = x
    for _ in range(100_000):
        y = y + zero
    del y                                               # never ran backward; released all the same


def test_second_backward_is_an_error():
    """G5: what the first one used is gone."""
    x = ones(2)
    y = (x * x).sum()
    y.backward()
    with pytest.raises(FAULT, match=r"\[backward\]"):
        y.backward()
    assert x.grad.tolist() == [2, 2]


def test_backward_needs_a_graph():
    with pytest.raises(FAULT, match=r"\[backward\]"):
        cmha.tensor(1.0).backward()
    with no_grad():
        y = ones(2).sum()
    with pytest.raises(FAULT, match=r"\[backward\]"):
        y.backward()


def live_tensors():
    return sum(isinstance(o, cmha.Tensor) for o in gc.get_objects())


def test_steps_leave_nothing_behind():
    """B34: no cycle between node and closure, so counting references alone frees every step."""
    layer, opt = nn.Linear(5, 3), None
    opt = cmha.AdamW(layer.parameters(), lr=0.01)
    x, targets = cmha.tensor(normal(7, 5)), cmha.tensor([0, 1, 2, 0, 1, 2, 0])
    total, counts = 0.0, []
    gc.collect()
    gc.disable()
    try:
        for _ in range(30):
            loss = cmha.cross_entropy(layer(x).gelu().softmax(), targets)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
            counts.append((live_tensors(), _core.memory_stats()["allocated"]))
    finally:
        gc.enable()
    assert len(set(counts[2:])) == 1 and np.isfinite(total)


def test_no_grad_builds_no_graph():
    x = ones(2)
    with no_grad():
        y = x * 2
        with no_grad():
            assert not (x * 2).requires_grad
        assert not (x * 2).requires_grad
    assert not y.requires_grad and (x * 2).requires_grad
    with pytest.raises(KeyError), no_grad():
        raise KeyError
    assert (x * 2).requires_grad


def test_no_grad_is_per_thread():
    x, inside, seen = ones(2), threading.Event(), []
    go = threading.Event()

    def other():
        with no_grad():
            inside.set()
            go.wait(10)
            seen.append((x * 2).requires_grad)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    assert (x * 2).requires_grad
    go.set()
    thread.join(10)
    assert seen == [False] and (x * 2).requires_grad


# --- later writes ---------------------------------------------------------------------------------------------------

def test_writing_the_numpy_array_behind_a_tensor():
    """B32: the right gradient or an error; the gradient of the changed values is neither."""
    a = np.array([1, 2], dtype=np.float32)
    x = cmha.from_numpy(a)
    x.requires_grad = True
    y = (x * x).sum()
    a += 1
    try:
        y.backward()
    except FAULT:
        return
    assert x.grad.tolist() == [2, 4]


@pytest.mark.parametrize("change", ["step", "load"])
def test_changing_a_saved_parameter_is_noticed(change):
    """B32: an update between forward and backward."""
    layer, x = nn.Linear(3, 2), leaf(normal(4, 3))
    y = layer(x).sum()
    for p in layer.parameters():
        p.grad = cmha.ones(p.shape)
    if change == "step":
        cmha.AdamW(layer.parameters(), lr=0.1).step()
    else:
        layer.load_state_dict({name: array(t) + 1 for name, t in layer.state_dict().items()})
    with pytest.raises(FAULT, match=r"\[backward\].*changed|\[backward\].*version|\[backward\].*modified"):
        y.backward()


def test_a_gradient_is_nobody_elses_memory():
    """The gradients of a + b are equal, not the same storage that one accumulation would then change for both."""
    a, b = ones(3), ones(3)
    (a + b).sum().backward()
    (a * 2).sum().backward()
    assert a.grad.tolist() == [3, 3, 3] and b.grad.tolist() == [1, 1, 1]
    seed = cmha.tensor([1.0, 1.0, 1.0])
    c = ones(3)
    y = c + 0.0
    y.backward(seed)
    (c * 4).sum().backward()
    assert seed.tolist() == [1, 1, 1] and c.grad.tolist() == [5, 5, 5]


def test_requires_grad_can_be_set():
    x = cmha.tensor([1.0, 2.0])
    assert not x.requires_grad
    x.requires_grad = True
    (x * x).sum().backward()
    assert x.grad.tolist() == [2, 4]
    x.requires_grad = False
    assert not (x * x).requires_grad


def test_a_vjp_changes_nothing():
    """An op's vjp may be called twice and gives the same bits; it accumulates nowhere."""
    from .cases import op

    x, w, b = (cmha.tensor(normal(*s, seed=i)).data for i, s in enumerate([(3, 5), (5, 7), (7,)]))
    y, vjp = op("linear")(x, w, b)
    dy = cmha.tensor(normal(3, 7, seed=9)).data
    first, second = vjp(dy), vjp(dy)
    assert isinstance(first, tuple) and len(first) == 3
    for one, two in zip(first, second, strict=True):
        same_bits(np.asarray(one), np.asarray(two))


def test_a_tied_table_needs_one_more_table_for_its_gradient():
    """Two gradients and their sum, but that of the rows looked up is kept as rows."""
    table = cmha.randn(20011, 17).detach()
    table.requires_grad = True
    h = nn.Embedding(20011, 17)
    h.weight = table
    ids = np.array([[3, 19999, 3], [0, 7, 19999]])
    loss = (h(ids).reshape(6, 17) @ table.T).sum()
    cmha.reset_peak_memory_stats()
    before = cmha.memory_stats()["allocated"]
    loss.backward()
    if before:
        assert cmha.memory_stats()["peak"] - before < 2.6 * 4 * 20011 * 17  # blocks are up to a quarter larger
    weight = np.asarray(table.detach(), float)
    dense = np.zeros((20011, 17))
    np.add.at(dense, ids.ravel(), np.broadcast_to(weight.sum(0), (6, 17)))
    dense += weight[ids.ravel()].sum(0)
    check(table.grad, dense, np.sqrt(20011) * np.abs(weight).sum(0), 1.0)
