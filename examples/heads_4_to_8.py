"""
Four heads or eight: the same width, the same number of parameters, cut into more and narrower heads.

    python examples/heads_4_to_8.py [STEPS]

head_dim falls from 16 to 8: twice as many patterns of attention, each described by half as many numbers. All scores
together cost the same, since H * hd is D both times.
"""

from learn import compare, number

compare(number("STEPS", 1000), [(f"n_head {n} (head_dim {64 // n})", {"n_head": n}) for n in (4, 8)])
