"""
Four claims of the lesson, each shown on real numbers.

    python examples/lesson_claims.py
"""

import numpy as np
from learn import no_arguments

import cmha
from cmha import AdamW, MultiHeadAttention, scaled_dot_product_attention
from cmha.nn import split_heads

no_arguments()
B, T, D, H = 2, 5, 12, 3
hd = D // H
cmha.manual_seed(0)
mha = MultiHeadAttention(D, H)
x = cmha.randn(B, T, D)


def claim(text):
    print(f"\n{text}")


claim("1. print(mha) lists its parts; parameters() returns eight tensors")
print(mha)
print(f"   {len(mha.parameters())} tensors, {mha.num_parameters()} numbers")

claim("2. Columns h*hd .. (h+1)*hd of W_q are head h's own projection")
heads = split_heads(mha.c_q(x), H).detach().numpy().reshape(B, H, T, hd)
for h in range(H):
    columns = slice(h * hd, (h + 1) * hd)
    alone = (x @ mha.c_q.weight[:, columns] + mha.c_q.bias[columns]).detach().numpy()
    same = np.array_equal(alone, heads[:, h])
    print(f"   head {h} and x @ W_q[:, {columns.start}:{columns.stop}] + b: same bits {same}")

claim("3. Changing one head's k and v changes no other head's output (before c_proj mixes them)")
q, k, v = (split_heads(project(x), H).reshape(B, H, T, hd).detach() for project in (mha.c_q, mha.c_k, mha.c_v))
before = scaled_dot_product_attention(q, k, v, is_causal=True).numpy()
changed_k, changed_v = k.numpy().copy(), v.numpy().copy()
changed_k[:, 1] += 1.0
changed_v[:, 1] *= -2.0
after = scaled_dot_product_attention(q, cmha.tensor(changed_k), cmha.tensor(changed_v), is_causal=True).numpy()
for h in range(H):
    print(f"   head {h}: largest change {np.abs(after - before)[:, h].max():.3f}")

claim("4. After one training step all eight tensors have moved")
names = [name for name, _ in mha.named_parameters()]
start = [p.detach().numpy().copy() for p in mha.parameters()]
optimizer = AdamW(mha.parameters(), lr=1e-2)
loss = ((mha(x, is_causal=True) - cmha.randn(B, T, D)) ** 2).mean()
loss.backward()
gradients = [np.abs(p.grad.numpy()).max() for p in mha.parameters()]
optimizer.step()
for name, old, new, gradient in zip(names, start, mha.parameters(), gradients, strict=True):
    moved = np.abs(new.detach().numpy() - old).max()
    print(f"   {name:14} moved by {moved:.1e}, gradient {gradient:.1e}")
print("   (c_k.bias adds the same number to all scores of a query, and softmax does not see that:")
print("   its true gradient is 0, what is there is rounding, and Adam divides by its size.)")
