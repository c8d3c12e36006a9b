"""GELU, GPT-2's tanh form (Hendrycks & Gimpel 2016): 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""

from cmha import _core


def gelu(x):
    return _core.gelu_forward(x), lambda dy: (_core.gelu_backward(dy, x),)
