"""Seeing attention: what each step does to numbers, strides and memory; and what changes when one changes it."""

from cmha.see.change import head_importance, heads_off, replace
from cmha.see.trace import eight_steps, trace
from cmha.see.weights import attention_weights

__all__ = ["attention_weights", "eight_steps", "head_importance", "heads_off", "replace", "trace"]
