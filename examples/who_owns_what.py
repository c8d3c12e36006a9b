"""
Who owns what: a (2, 3, 8) tensor on its way through split_heads, every element's owner printed.

    python examples/who_owns_what.py

Element n of x is the number n, so that after any reshape or permute the number tells where it came from: b = batch
row, t = time, h = head (here 2, so head_dim is 4), d = column inside the head. The right way is reshape, permute,
reshape. The wrong way is one reshape straight to (B*H, T, hd): its shape is the same, nothing complains, and heads end
up in time.
"""

from learn import no_arguments

import cmha
from cmha.nn import split_heads

no_arguments()

B, T, D, H = 2, 3, 8, 2
hd = D // H


def owner(n):
    """The place in x, (B, T, H, hd), that number n came from."""
    n, d = divmod(int(n), hd)
    n, h = divmod(n, H)
    b, t = divmod(n, T)
    return f"b{b}t{t}h{h}d{d}"


def show(title, x, names):
    """One line for each row of the last axis: where it stands now, and who owns what is in it."""
    order = "in order" if x.is_contiguous() else "not in order"
    print(f"\n{title}\n  shape {x.shape}, strides {x.strides}, memory {order}")
    rows = x.numpy().reshape(-1, x.shape[-1])
    for i, row in enumerate(rows):
        place = []
        for size, name in zip(reversed(x.shape[:-1]), reversed(names), strict=True):
            i, at = divmod(i, size)
            place.append(f"{name} {at}")
        print(f"  {', '.join(reversed(place)):24}", *map(owner, row))


x = cmha.tensor([[[float((b * T + t) * D + c) for c in range(D)] for t in range(T)] for b in range(B)])
show("x (B, T, D)", x, ["b", "t"])

cut = x.reshape(B, T, H, hd)
show("1. reshape (B, T, H, hd): cut every row into heads; nothing moves", cut, ["b", "t", "h"])

forward = cut.permute(0, 2, 1, 3)
show("2. permute(0, 2, 1, 3), (B, H, T, hd): heads come before time; only the strides change", forward, ["b", "h", "t"])

right = forward.reshape(B * H, T, hd)
show("3. reshape (B*H, T, hd): one batch for each head; now the numbers move", right, ["b*H+h", "t"])
assert (right.numpy() == split_heads(x, H).numpy()).all()

wrong = x.reshape(B * H, T, hd)
show("WRONG: reshape (B*H, T, hd) at once: look at h inside one 'head'", wrong, ["'head'", "t"])

print("\n  batch  right: rows of          wrong: rows of")
for i in range(B * H):
    right_rows, wrong_rows = ([owner(row[0])[:-2] for row in y.numpy()[i]] for y in (right, wrong))
    print(f"  {i:5}  {' '.join(right_rows):22}  {' '.join(wrong_rows)}")
