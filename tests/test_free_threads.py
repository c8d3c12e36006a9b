"""P3, P4: many Python threads at once. On a free-threaded Python they really run at once; every other one takes turns
at odd moments. What must hold is the same: the bits of a serial run, or one clear error, and never a damaged array."""

import os
import queue
import subprocess
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cmha
from cmha import GPT, AdamW, GPTConfig, KVCache, MultiHeadAttention, _core, autograd, random
from cmha.nn import Dropout
from cmha.text.corpora import Corpus
from cmha.train import Trainer, TrainSettings

from .checking import bits
from .models import ids, tiny


@pytest.fixture(autouse=True)
def quick_switches():
    """With a GIL: let threads take turns in the middle of things, not every five milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(n, work, *arguments):
    """work(i, *arguments) for i below n, each in a thread of its own, begun at the same moment; the results."""
    start = threading.Barrier(n)

    def begin(i):
        start.wait(30)
        return work(i, *arguments)

    with ThreadPoolExecutor(n) as pool:
        return [done.result(timeout=300) for done in [pool.submit(begin, i) for i in range(n)]]


# ------------------------------------------------------------------------------------------------- the same bits

def model_to_train(i):
    cmha.manual_seed(i)
    gpt = GPT(GPTConfig(vocab_size=11, block_size=6, n_layer=2, n_head=2, n_embd=8 + 4 * (i % 3), dropout=0.3))
    gpt.checkpoint_activations = i % 2 == 1
    return gpt


def train(gpt, i, steps=4):
    optimizer = AdamW(gpt.parameters(), 0.01)
    for step in range(steps):
        random.begin_step(step, seed=i)
        rows = ids(3 + i % 2, 7, seed=100 * i + step)
        _, loss = gpt(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        cmha.clip_grad_norm_(gpt.parameters(), 0.5)
        optimizer.step()
    return bits(loss, *gpt.parameters())


def test_models_trained_side_by_side_get_the_bits_of_a_serial_run():
    """With dropout, and, in every second one, activations made again, which draw the same numbers again."""
    expected = [train(model_to_train(i), i) for i in range(6)]
    models = [model_to_train(i) for i in range(6)]
    assert together(6, lambda i: train(models[i], i)) == expected


def test_whole_training_runs_side_by_side_get_the_bits_of_a_serial_run():
    """Two runs differ in their length of a step, so that their dropout sites interleave anew at each."""

    def run(i):
        numbers = np.random.default_rng(i).integers(0, 11, 300)
        settings = TrainSettings(steps=5, batch_size=3 + i, micro_batch_size=2, eval_interval=3, lr=0.01, seed=i)
        return Trainer(model_to_train(i), Corpus.from_ids(numbers[:200], numbers[200:]), settings, progress=False)

    def trained(trainer):
        assert trainer.run() is None
        return bits(*trainer.model.parameters()), [row["loss"] for row in trainer.rows]

    expected = [trained(run(i)) for i in range(3)]
    runs = [run(i) for i in range(3)]
    assert together(3, lambda i: trained(runs[i])) == expected


@pytest.mark.parametrize("calls", [8, pytest.param(200, marks=pytest.mark.full)])
def test_shared_weights_serve_eight_threads(calls):
    """P3: models that nobody changes, eight threads, each call with an input of its own."""
    gpt, mha = tiny(), MultiHeadAttention(12, 3)
    wide = cmha.tensor(np.random.default_rng(0).standard_normal((65, 67)).astype(np.float32))

    def answer(i, call):
        rng = np.random.default_rng([i, call])
        x = cmha.tensor(rng.standard_normal((33, 65)).astype(np.float32), requires_grad=True)
        y = (x @ wide).softmax()
        (y * y).sum().backward()
        with cmha.no_grad():
            parts = [y, x.grad, mha(cmha.tensor(rng.standard_normal((2, 5, 12)).astype(np.float32)), is_causal=True)]
            parts += [gpt(ids(1 + i % 3, 2 + call % 7, seed=call))]
        written = gpt.generate([[i, call % 11]], 5, seed=call)
        return bits(*parts, written)

    serial = [[answer(i, call) for call in range(calls)] for i in range(8)]
    assert together(8, lambda i: [answer(i, call) for call in range(calls)]) == serial


def test_the_number_of_threads_may_change_meanwhile():
    """Also from two threads at once; kernels that run, and those that begin, give the same bits."""
    rng = np.random.default_rng(1)
    a, b = (cmha.tensor(rng.standard_normal(s).astype(np.float32)) for s in ((190, 210), (210, 170)))
    x = cmha.tensor(rng.standard_normal((2, 3, 130, 16)).astype(np.float32))

    def work():
        return bits(a @ b, cmha.scaled_dot_product_attention(x, x, x, is_causal=True), (a @ b).sum(axis=0))

    expected = work()

    def part(i):
        if i >= 2:
            return [work() for _ in range(30)]
        for n in range(600):
            cmha.set_num_threads(1 + (n + i) % 5)
        return []

    assert {got for results in together(5, part) for got in results} == {expected}
    cmha.set_num_threads(3)
    assert cmha.get_num_threads() == 3


def test_generating_does_not_touch_the_mode_of_a_model_in_training():
    """The mode is the model's; whether a thread that generates drops is the thread's."""
    gpt = tiny(dropout=0.5).train()
    plain = tiny(dropout=0.0)
    seen = []

    def elsewhere():
        seen.append((gpt.training, bits(Dropout(0.5)(cmha.ones(50))) != bits(cmha.ones(50))))

    def look(*_):
        together(1, lambda _: elsewhere())

    handle = gpt.ln_f.register_forward_hook(look)
    assert np.array_equal(gpt.generate([[1, 2]], 2, seed=3), plain.generate([[1, 2]], 2, seed=3))
    handle.remove()
    assert seen == [(True, True)] * 2


def test_an_error_in_one_thread_is_nothing_to_the_others():
    a, b = cmha.ones(70, 80), cmha.full((80, 60), 0.5)
    expected = bits((a @ b).exp())

    def part(i):
        for n in range(100):
            if i % 2:
                assert bits((a @ b).exp()) == expected
            else:
                with pytest.raises(ValueError, match="inner sizes"):
                    (a @ a) if n % 2 else (b @ b)
                with pytest.raises(MemoryError):
                    cmha.ones(1 << 28, 1 << 28)
        return True

    assert together(4, part) == [True] * 4


# ------------------------------------------------------------------------------------------------- memory and numbers

@pytest.mark.parametrize("rounds", [60, pytest.param(3000, marks=pytest.mark.full)])
def test_an_allocation_storm_mixes_no_two_arrays(rounds):
    """Blocks of all sizes are taken by one thread and given back by another, and each holds what was put there."""
    gate, before = queue.Queue(), cmha.memory_stats()["allocated"]

    def part(i):
        rng = np.random.default_rng(i)
        for n in range(rounds):
            own = [(_core.full((int(2 ** rng.uniform(0, 17)),), 1000 * i + n + k / 8), 1000 * i + n + k / 8)
                   for k in range(8)]
            gate.put(own)
            for array, value in gate.get():  # its own, or another thread's
                a = np.asarray(array)
                assert a[0] == value and a[-1] == value and (a == value).all()
        return True

    assert together(6, part) == [True] * 6
    stats = cmha.memory_stats()
    assert stats["allocated"] == before and stats["allocated"] <= stats["peak"] <= stats["reserved"]


def test_no_write_is_lost_from_the_count_of_changes():
    arrays, before = [_core.full((3,), 0.0) for _ in range(6)], _core.change_count()

    def part(i):
        seen = []
        for _ in range(2000):
            arrays[i].bump()
            seen.append(arrays[i].version)
        return seen

    versions = [version for seen in together(6, part) for version in seen]
    assert _core.change_count() == before + 12000
    assert sorted(versions) == list(range(before + 1, before + 12001))


def test_no_random_number_is_handed_out_twice():
    """The generator is the process's: who gets which number is chance, that all of them come, once each, is not."""
    cmha.manual_seed(5)
    serial = np.concatenate([cmha.rand(3).numpy() for _ in range(8 * 40)])
    cmha.manual_seed(5)
    drawn = together(8, lambda i: np.concatenate([cmha.rand(3).numpy() for _ in range(40)]))
    assert np.array_equal(np.sort(np.concatenate(drawn)), np.sort(serial))


def test_each_thread_counts_its_own_dropout_sites():
    cmha.manual_seed(7)
    layer, x = Dropout(0.5), cmha.ones(40)
    here = [bits(layer(x)) for _ in range(20)]
    assert len(set(here)) == 20
    assert together(4, lambda i: [bits(layer(x)) for _ in range(20)]) == [here] * 4
    cmha.manual_seed(7)
    assert bits(layer(x)) == here[0]


def test_no_grad_is_each_threads_own():
    x = cmha.ones(4, requires_grad=True)
    with cmha.no_grad():
        assert together(3, lambda i: [(x * 2.0).requires_grad for _ in range(50)]) == [[True] * 50] * 3
        assert not (x * 2.0).requires_grad


# ------------------------------------------------------------------------------------------------- one for two threads

def test_a_graph_has_one_backward_and_the_second_thread_is_told():
    """The second call comes while the first is inside a vjp, and once it is through."""
    errors = []

    def second(y):
        with pytest.raises(RuntimeError, match="freed by an earlier backward") as error:
            y.backward()
        errors.append(error)

    def double(x):
        def vjp(dy):
            together(1, lambda _: second(y))
            return (_core.add(dy, dy),)

        return _core.add(x, x), vjp

    leaf = cmha.ones(3, requires_grad=True)
    data, node = autograd.apply(double, leaf * 1.0)
    y = cmha.Tensor(data)
    y._node, y._requires_grad = node, True
    y = y.sum()
    y.backward()
    second(y)
    assert len(errors) == 2 and leaf.grad.tolist() == [2.0] * 3


def test_of_four_threads_that_want_one_backward_one_gets_it():
    for n in range(30):
        leaf = cmha.ones(3, requires_grad=True)
        loss = (leaf * 3.0 * (leaf + 1.0)).sum()

        def part(_, loss=loss):
            try:
                loss.backward()
            except RuntimeError as error:
                return str(error)

        got = together(4, part)
        assert got.count(None) == 1 and all("freed" in text for text in got if text), n
        assert leaf.grad.tolist() == [9.0] * 3


def test_a_models_cache_is_one_threads_until_the_call_is_over():
    """P3: the second call is refused and changes nothing, the first has the bits that it has alone."""
    gpt, first = tiny(), ids(1, 3)
    alone = gpt.new_cache(1)
    expected = bits(gpt(first, cache=alone), gpt([[5]], cache=alone))
    cache, refused = gpt.new_cache(1), []

    def other(_):
        for call in (lambda: gpt([[1]], cache=cache), lambda: gpt.last_logits([[1]], cache=cache), cache.reset,
                     lambda: cache.copy(), lambda: cache.reuse([1, 2]), lambda: gpt([[1]], cache=cache.row(0))):
            with pytest.raises(RuntimeError, match="one thread at a time") as error:
                call()
            refused.append(error)

    handle = gpt.h[1].register_forward_hook(lambda *_: together(1, other) and None)
    got = gpt(first, cache=cache)
    handle.remove()
    assert len(refused) == 6 and len(cache) == 3
    assert bits(got, gpt([[5]], cache=cache)) == expected


def test_a_key_value_cache_that_threads_fight_for_holds_whole_pieces():
    """Every append is refused, or stands in the cache as one piece, and the count is right."""
    cache = KVCache(2, 3, 4, 4 * 50 * 2 + 1)

    def part(i):
        done = []
        for n in range(50):
            value = 1000.0 * (i + 1) + n
            k = cmha.full((2, 3, 2, 4), value)
            try:
                cache.append(k, -k)
                done.append(value)
            except RuntimeError as error:
                assert "one thread at a time" in str(error)
        return done

    done = [value for values in together(4, part) for value in values]
    assert len(cache) == 2 * len(done) > 0
    one = np.zeros((2, 3, 1, 4), np.float32)
    k_all, v_all = (t.numpy()[:, :, :-1] for t in cache.append(one, one))
    assert np.array_equal(k_all, -v_all)
    pieces = k_all.reshape(2, 3, len(done), 2, 4)
    assert (pieces == pieces[:1, :1, :, :1, :1]).all()
    assert sorted(pieces[0, 0, :, 0, 0].tolist()) == sorted(done)


def test_hooks_that_threads_register_are_all_there():
    for _ in range(50):
        layer, counted = Dropout(), []
        handles = together(4, lambda i: layer.register_forward_hook(lambda *_: counted.append(1) and None))  # noqa: B023
        layer(cmha.ones(2))
        assert len(counted) == 4
        for handle in handles:
            handle.remove()


# ------------------------------------------------------------------------------------------------- without a GIL

@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_the_import_leaves_the_gil_off():
    """P4: a module that does not declare itself would turn it on again, with a warning."""
    code = "import sys, cmha; cmha.ones(2).sum(); print(sys._is_gil_enabled())"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True,
                          timeout=60)
    assert done.stdout.strip() == "False", done.stderr
