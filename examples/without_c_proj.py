"""
Is c_proj needed? Training with the output projection and without.

    python examples/without_c_proj.py [STEPS]

Without c_proj the heads' outputs are only laid side by side: head h can write to columns h*hd .. (h+1)*hd of the
residual stream and to no other. The MLP after it still mixes all columns, so the model learns, with fewer parameters.
"""

from learn import compare, number

compare(number("STEPS", 1000), [("with c_proj", {}), ("without c_proj", {"output_projection": False})])
