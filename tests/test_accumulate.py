"""Gradient accumulation, its tree and its shares; activation checkpointing; what they cost in memory."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

import cmha
import cmha.train.trainer as module
from cmha import GPT, GPTConfig, random
from cmha.text.corpora import Corpus
from cmha.train import Trainer, TrainSettings
from cmha.train.accumulate import Gradients, OneProcess, share, tree_sum
from cmha.train.batches import training_batch
from cmha.train.memory import bytes_needed

from .checking import SANITIZED

IDS = np.random.default_rng(3).integers(0, 11, 400)


def trainer(ids=IDS, processes=None, dropout=0.2, **settings):
    defaults = {"steps": 3, "batch_size": 10, "eval_interval": 3, "lr": 0.01}
    cmha.manual_seed(8)
    model = GPT(GPTConfig(vocab_size=11, block_size=7, n_layer=3, n_head=2, n_embd=6, dropout=dropout))
    corpus = Corpus.from_ids(ids[:350], ids[350:])
    return Trainer(model, corpus, TrainSettings(**defaults | settings), progress=False, processes=processes)


def weights(run):
    return b"".join(np.array(p.detach()).tobytes() for p in run.model.parameters())


def gradients(run):
    """Of the whole step, as the optimiser would get them, in double."""
    run.optimizer.step = lambda **_: None
    run._train_step()
    return [np.array(p.grad, np.float64) for p in run.model.parameters()]


def distance(one, other):
    """Largest difference of an element, of the largest element: gradients that cancel have no scale of their own."""
    largest = max(np.abs(a).max() for a in one)
    return max(np.abs(a - b).max() for a, b in zip(one, other, strict=True)) / largest


class Names:
    """Adds up to a text that tells how it was added."""

    def __init__(self, text):
        self.text = text

    def add(self, right):
        return Names(f"({self.text} {right.text})")


def tree(first, stop):
    return tree_sum(first, stop, lambda number: Names(str(number))).text


def test_the_tree_is_fixed_and_shares_are_its_subtrees():
    assert tree(0, 1) == "0" and tree(0, 5) == "(((0 1) 2) (3 4))"
    assert tree(0, 8) == "(((0 1) (2 3)) ((4 5) (6 7)))"
    for count, size in itertools.product(range(1, 21), (1, 2, 4, 8)):
        if size > count:
            with pytest.raises(ValueError, match="power of two"):
                share(count, 0, size)
            continue
        shares = [share(count, rank, size) for rank in range(size)]
        assert [n for part in shares for n in range(*part)] == list(range(count))
        sums = [Names(tree(*part)) for part in shares]
        while len(sums) > 1:  # ranks r and r + d, the lower one on the left
            sums = [left.add(right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
        assert sums[0].text == tree(0, count), (count, size)
    for size in (3, 6):
        with pytest.raises(ValueError, match="power of two"):
            share(8, 0, size)


def test_no_more_sets_of_gradients_than_the_levels_of_the_tree():
    alive, most = 0, 0

    class Counted(Names):
        def __init__(self, text=""):
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def add(self, right):
            nonlocal alive
            alive -= 1  # right is used up, the sum is in self
            return self

    for count in range(1, 40):
        alive = most = 0
        tree_sum(0, count, lambda number: Counted())
        levels = (count - 1).bit_length()
        assert alive == 1 and most <= levels + 1 and (most == levels + 1 or count != 1 << levels)


class Ranks(OneProcess):
    """Ranks of one process, one after the other: each leaves its sum where the last one finds it."""

    def __init__(self, rank, size, sums):
        self.rank, self.size, self.sums = rank, size, sums

    def reduce(self, part):
        self.sums.append(part)
        if len(self.sums) < self.size:
            return Gradients(part.loss, list(part.arrays))
        sums = self.sums
        while len(sums) > 1:
            sums = [left.add(right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
        self.sums.clear()
        return sums[0]


def test_d8_t6_the_same_micro_batches_give_the_same_bits_for_any_number_of_processes():
    whole = trainer(micro_batch_size=2)
    whole._train_step()
    for size in (2, 4):
        sums = []
        runs = [trainer(micro_batch_size=2, processes=Ranks(rank, size, sums)) for rank in range(size)]
        for run in runs:
            run._train_step()
        assert weights(runs[-1]) == weights(whole) and runs[-1]._since == whole._since


def test_t6_micro_batches_against_one_large_backward_pass():
    """N11: each gradient is a sum over tokens; cut into parts it moves by rounding alone. Dropout is the same rows'."""
    one = gradients(trainer())
    for size in (1, 3, 4, 5):  # 3 and 4 leave a smaller one at the end
        parts = gradients(trainer(micro_batch_size=size))
        assert distance(one, parts) <= 2.0**-23 * math.sqrt(70), size
        assert not all(map(np.array_equal, one, parts))  # they were cut


def test_t6_the_gradient_of_a_step_is_the_gradient_of_its_windows_one_by_one():
    """Without dropout, against the mean of single windows in double: neither weight nor tree loses a row."""
    run = trainer(dropout=0.0, micro_batch_size=3)
    together = gradients(run)
    total = [0.0] * len(together)
    for row in range(10):
        single = trainer(dropout=0.0)
        inputs, targets = training_batch(single.corpus.training, 10, 7, seed=0, step=0)
        _, loss = single.model(inputs[row : row + 1], targets[row : row + 1])
        loss.backward()
        total = [t + np.array(p.grad, np.float64) / 10 for t, p in zip(total, single.model.parameters(), strict=True)]
    assert distance(total, together) <= 2.0**-23 * math.sqrt(70)


def test_b41_micro_batches_weigh_what_they_count(monkeypatch):
    """Ignored targets: 66 of 70 in the first micro-batch, none in the rest; one micro-batch counts nothing at all."""
    real = module.training_batch

    def with_holes(*sizes, **place):
        inputs, targets = real(*sizes, **place)
        targets[0], targets[1, 4:], targets[2:4] = -1, -1, -1
        return inputs, targets

    monkeypatch.setattr(module, "training_batch", with_holes)
    one, parts = trainer(dropout=0.0), trainer(dropout=0.0, micro_batch_size=2)
    assert distance(gradients(one), gradients(parts)) <= 2.0**-23 * math.sqrt(70)
    assert abs(one._since["loss"] - parts._since["loss"]) < 1e-6


def test_b35_a_step_without_targets_changes_nothing(monkeypatch):
    monkeypatch.setattr(module, "training_batch", lambda *_, **__: (np.ones((10, 7), int), np.full((10, 7), -1)))
    run = trainer(micro_batch_size=4, weight_decay=0.0)
    before = weights(run)
    run._train_step()
    assert weights(run) == before and run._since["loss"] == 0.0


def test_the_size_of_micro_batches_does_not_change_dropout():
    draws = []
    for first, rows in ((0, 6), (0, 2), (2, 2), (4, 2)):
        random.begin_step(5, first_row=first, seed=9)
        layer = cmha.nn.layers.Dropout(0.5)
        draws.append(layer(cmha.ones(rows, 3, 4)).numpy())
    assert np.array_equal(np.concatenate(draws[1:]), draws[0])


@pytest.mark.parametrize("micro_batch_size", [10, 3])
def test_activation_checkpointing_changes_no_bit(micro_batch_size):
    runs = [trainer(micro_batch_size=micro_batch_size, checkpoint_activations=flag) for flag in (False, True)]
    for run in runs:
        run.run()
    assert weights(runs[0]) == weights(runs[1])
    assert runs[0].rows[0]["loss"] == runs[1].rows[0]["loss"]


def test_activation_checkpointing_keeps_to_blocks_and_to_training():
    cmha.manual_seed(1)
    gpt = GPT(GPTConfig.tiny(vocab_size=9, dropout=0.3))
    gpt.checkpoint_activations = True
    random.begin_step(0)
    _, loss = gpt([[1, 2, 3]], [[2, 3, 4]])
    after = random.position()
    loss.backward()
    assert random.position() == after  # what comes next draws what it would have drawn
    _, loss = gpt([[1, 2, 3]], [[2, 3, 4]])
    cmha.AdamW(gpt.parameters(), 0.1).step()  # writes the parameters that the second pass would read
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
    gpt.eval()
    with cmha.no_grad():
        a = gpt([[1, 2, 3]]).numpy()
    gpt.checkpoint_activations = False
    with cmha.no_grad():
        assert np.array_equal(gpt([[1, 2, 3]]).numpy(), a)


PEAK = """
import sys
import numpy as np
from cmha import GPT, GPTConfig, set_num_threads
from cmha.text.corpora import Corpus
from cmha.train import Trainer, TrainSettings
set_num_threads(1)
batch, micro, again = (int(word) for word in sys.argv[1:])
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
before = peak()
ids = np.arange(3000) % 100
settings = TrainSettings(steps=2, batch_size=batch, micro_batch_size=micro, checkpoint_activations=bool(again))
model = GPT(GPTConfig(vocab_size=100, block_size=256, n_layer=6, n_head=4, n_embd=64))
run = Trainer(model, Corpus.from_ids(ids[:2000], ids[2000:2300]), settings, progress=False)
run._train_step()
run._train_step()
print(peak() - before)
"""


@pytest.mark.skipif(SANITIZED, reason="memory is measured without sanitizers")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_p6_the_estimate_knows_micro_batches_and_activation_checkpointing():
    """Against the growth of a process after its imports: never much above the estimate, never far below."""
    config = GPTConfig(vocab_size=100, block_size=256, n_layer=6, n_head=4, n_embd=64)
    measured, runs = {}, [(16, 16, 0), (16, 16, 1), (16, 2, 0)]
    programs = [subprocess.Popen([sys.executable, "-c", PEAK, *map(str, run)], stdout=subprocess.PIPE) for run in runs]
    for (batch, micro, again), program in zip(runs, programs, strict=True):
        measured[micro, again] = int(program.communicate()[0])
        estimate = bytes_needed(config, micro, batch // micro, bool(again))
        more = 8 << 20  # what is imported only when a run begins
        assert 0.7 * estimate < measured[micro, again] < 1.1 * estimate + more, (micro, again, estimate, measured)
    assert measured[16, 1] < measured[16, 0] / 2 and measured[2, 0] < measured[16, 0] / 2
