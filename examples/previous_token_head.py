"""
Which head looks at the token before? Found in a model that `cmha train` made, and shown.

    cmha train --out runs/seen
    python examples/previous_token_head.py runs/seen

A previous-token head moves to each position what stands right before it; induction heads in a later layer build on that
(Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Olsson et al. 2022). For each head: the mean
weight on the token before, how often that is its largest weight, and what the loss rises by when the head is off.
"""

import sys

import numpy as np
from learn import usage

import cmha
from cmha.see.maps import attention_maps
from cmha.see.terminal import has_colour, heat_maps
from cmha.text import load_tokenizer
from cmha.text.corpora import default_text

WINDOWS = 64


def windows(tokenizer, size):
    """The end of Python's documentation, which training did not see: (64, size)."""
    known = set(getattr(tokenizer, "characters", "")) or None
    text = default_text()[-4 * WINDOWS * size :]
    ids = tokenizer.encode("".join(c for c in text if known is None or c in known))
    count = min(WINDOWS, len(ids) // size)
    return np.array(ids[-count * size :]).reshape(count, size)


def before(weights):
    """(mean weight on key t - 1 of query t, share of queries whose largest weight that is) of weights (B, T, T)."""
    queries = np.arange(1, weights.shape[1])
    return weights[:, queries, queries - 1].mean(), (weights[:, 1:].argmax(axis=-1) == queries - 1).mean()


def main(folder):
    gpt, tokenizer = cmha.GPT.from_pretrained(folder), load_tokenizer(folder)
    ids = windows(tokenizer, gpt.cfg.block_size)
    found = cmha.attention_weights(gpt, ids)
    importance = cmha.head_importance(gpt, ids)
    even = np.mean([1 / (t + 1) for t in range(1, ids.shape[1])])
    print(f"weight on the token before, of {ids.size} tokens; a head that looks everywhere alike has {even:.2f}\n")
    print("layer  head  mean weight  is the largest  loss without the head")
    scores = {}
    for layer, head in np.ndindex(*importance.shape):
        mean, largest = before(found[layer][:, head])
        scores[layer, head] = mean
        print(f"{layer:5}  {head:4}  {mean:11.2f}  {largest:14.0%}  {importance[layer, head]:+20.4f}")
    layer, head = max(scores, key=scores.get)
    print(f"\nlayer {layer}, head {head} looks at the token before: the diagonal under the main one\n")
    maps = attention_maps(gpt, tokenizer, tokenizer.decode(ids[0][:24]), [layer], f"layer {layer}, head {head}")
    maps.weights = {layer: maps.weights[layer][head : head + 1]}
    lines = heat_maps(maps, colour=has_colour(sys.stdout), width=80, encoding=sys.stdout.encoding).splitlines()
    print("\n".join(line for line in lines if not line.strip().startswith(("layer", "head"))))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        usage("RUN (a folder that `cmha train` wrote)")
    try:
        main(sys.argv[1])
    except (OSError, ValueError) as error:  # no such folder, or what it holds is no run
        sys.exit(f"{sys.argv[0]}: error: {error}")
