"""What generate and stream are told, as types: for who reads a signature, and a checker; nothing imports them else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from cmha.nn.kv_cache import ModelCache
from cmha.tensor import Tensor
from cmha.types import FloatArray, IntArray

IdArray: TypeAlias = NDArray[np.integer[Any]] | Tensor
IdRow: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
TokenRows: TypeAlias = IntArray | list[list[int]]  # the latter where the prompts differ in length
LogprobRows: TypeAlias = FloatArray | list[list[float]]
Seed: TypeAlias = int | Sequence[int] | NDArray[np.integer[Any]] | None  # one, or one for each row; None draws one
Stop: TypeAlias = SupportsIndex | Iterable[SupportsIndex] | None
StopStrings: TypeAlias = str | Collection[str] | None
Progress: TypeAlias = Callable[[int], object] | None


class Decoder(Protocol):
    """What reads the last ids to find a stop string: any tokenizer."""

    def decode(self, ids: list[int], /) -> str: ...


class StreamOptions(TypedDict, total=False):
    """The keywords of stream; cmha/generate/sampling.py says what those of sampling do."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    stop: Stop
    stop_strings: StopStrings
    tokenizer: Decoder | None
    seed: Seed
    cache: ModelCache | None


class GenerateOptions(StreamOptions, total=False):
    """Those of generate: the same, and beam search's."""

    num_beams: int
    length_penalty: float
    progress: Progress
