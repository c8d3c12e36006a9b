"""A helper, not an example: heads_4_to_8.py and without_c_proj.py train the tiny GPT with it; others read their
arguments with it."""

import re
import sys
import time

import numpy as np

import cmha
from cmha import GPT, AdamW, GPTConfig
from cmha.text.corpora import open_data

BATCH_SIZE, MAX_LR = 8, 3e-3


def usage(arguments):
    """Says in one line how the example is called, and ends it."""
    print(f"usage: python {sys.argv[0]} {arguments}", file=sys.stderr)
    sys.exit(2)


def no_arguments():
    if len(sys.argv) > 1:
        usage("(it takes no arguments)")


def number(name, default, most=99999):
    """The only argument of an example, an integer from 1 to `most`, or its default."""
    given = sys.argv[1:]
    if not given:
        return default
    if len(given) == 1 and re.fullmatch("[1-9][0-9]{0,4}", given[0]) and int(given[0]) <= most:
        return int(given[0])
    return usage(f"[{name}] (an integer from 1 to {most}; {default} by default)")


def learn(steps, **changes):
    """GPTConfig.tiny with `changes`, always seed 0: (parameters, training loss, validation loss, seconds)."""
    corpus = open_data([], "char", GPTConfig.tiny(**changes).block_size)
    training, validation = corpus.training, corpus.validation
    config = GPTConfig.tiny(corpus.tokenizer.vocab_size, **changes)

    cmha.manual_seed(0)
    gpt = GPT(config)
    optimizer = AdamW(gpt.parameters(), lr=MAX_LR, weight_decay=0.1)
    random = np.random.default_rng(0)

    def windows(ids, starts):
        """The text at `starts`, and the same text one letter on: what is to be predicted."""
        rows = ids[starts[:, None] + np.arange(config.block_size + 1)]
        return rows[:, :-1], rows[:, 1:]

    losses, start = [], time.perf_counter()
    for step in range(steps):
        optimizer.lr = cmha.cosine_schedule(
            step, max_lr=MAX_LR, min_lr=MAX_LR / 10, warmup_steps=min(100, steps // 10), decay_steps=steps
        )
        _, loss = gpt(*windows(training, random.integers(0, len(training) - config.block_size, BATCH_SIZE)))
        optimizer.zero_grad()
        loss.backward()
        cmha.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - start

    gpt.eval()
    with cmha.no_grad():
        _, loss = gpt(*windows(validation, np.arange(0, len(validation) - config.block_size, 8 * config.block_size)))
    return gpt.num_parameters(), float(np.mean(losses[-100:])), loss.item(), seconds


def compare(steps, variants):
    """Trains each (name, changes) and prints the table."""
    print(f"{steps} steps each, the same seed and the same batches\n")
    print(f"{'':22} parameters  training loss  validation loss  seconds")
    for name, changes in variants:
        parameters, training_loss, validation_loss, seconds = learn(steps, **changes)
        print(f"{name:22} {parameters:10,}  {training_loss:13.4f}  {validation_loss:15.4f}  {seconds:7.1f}")
