"""
What the KV cache saves: the same text written with it and without it, multiplications counted, seconds measured.

    python examples/what_the_cache_saves.py [NEW_TOKENS]

Without a cache every new token sends the whole text so far through the model again. With one, only the new token goes
through; its queries meet the keys and values kept from before. Not one bit of the result differs. Seconds shrink less
than multiplications: one token keeps the kernels less busy, and every call and every weight read costs what it did.
"""

import time

import numpy as np
from learn import number

import cmha
from cmha import GPT, GPTConfig

new_tokens = number("NEW_TOKENS", 192, most=2000)
PROMPT = 16

cmha.manual_seed(0)
config = GPTConfig(vocab_size=65, block_size=PROMPT + new_tokens, n_layer=4, n_head=4, n_embd=128)
gpt = GPT(config)
gpt.eval()
prompt = np.random.default_rng(0).integers(0, config.vocab_size, (1, PROMPT))


def multiplications(config, T, S):
    """Of one forward pass of T new positions that see S positions in all (causal): S = T without a cache."""
    D, visible = config.n_embd, T * (S - T) + T * (T + 1) // 2  # (query, key) pairs
    projections = 4 * T * D * D  # c_q, c_k, c_v, c_proj
    attention = 2 * visible * D  # q kT, and weights times v
    mlp = 8 * T * D * D  # D -> 4 D -> D
    return config.n_layer * (projections + attention + mlp) + T * D * config.vocab_size


def write(use_cache):
    """(logits of every new token, multiplications, seconds); always the likeliest token."""
    ids, logits_seen, count = prompt, [], 0
    cache = gpt.new_cache(1) if use_cache else None
    start = time.perf_counter()
    with cmha.no_grad():
        for _ in range(new_tokens):
            new = ids if cache is None else ids[:, len(cache) :]  # what the model has not seen yet
            logits = gpt(new, cache=cache).numpy()[:, -1]
            count += multiplications(config, new.shape[1], ids.shape[1])
            logits_seen.append(logits)
            ids = np.concatenate([ids, logits.argmax(-1)[:, None]], axis=1)
    return np.stack(logits_seen), count, time.perf_counter() - start


write(use_cache=True)  # warm up
without, count_without, seconds_without = write(use_cache=False)
with_cache, count_with, seconds_with = write(use_cache=True)

print(f"{new_tokens} new tokens after a prompt of {PROMPT}, {gpt.num_parameters():,} parameters\n")
print("cache      multiplications      seconds    tokens/s")
print(f"no     {count_without:19,}   {seconds_without:10.3f}  {new_tokens / seconds_without:10.0f}")
print(f"yes    {count_with:19,}   {seconds_with:10.3f}  {new_tokens / seconds_with:10.0f}")
print(f"saved  {count_without / count_with:18.1f}x   {seconds_without / seconds_with:9.1f}x")
print(f"\nsame bits in every logit: {np.array_equal(without.view(np.int32), with_cache.view(np.int32))}")
