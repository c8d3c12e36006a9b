"""Seeing attention: what each step does to shapes, strides and memory."""

from cmha.see.trace import trace

__all__ = ["trace"]
