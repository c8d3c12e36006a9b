"""The loop around the model: whole rows (generate) or one id at a time (stream)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from cmha.errors import check_flag, check_integer, message, quote
from cmha.generate.beam import beam_search, check_beams
from cmha.generate.rows import Rows, check_prompts
from cmha.generate.sampling import check_sampling, log_softmax, next_token
from cmha.generate.stops import Stops, check_cache, filled

if TYPE_CHECKING:
    from typing import Unpack

    from numpy.typing import NDArray

    from cmha.generate.options import (
        Decoder,
        GenerateOptions,
        IdArray,
        IdRow,
        LogprobRows,
        Progress,
        Seed,
        Stop,
        StopStrings,
        StreamOptions,
        TokenRows,
    )
    from cmha.gpt import GPT
    from cmha.nn.kv_cache import ModelCache
    from cmha.types import FloatArray, IntArray


@overload
def generate(
    model: GPT, ids: IdArray, max_new_tokens: int, *, return_logprobs: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> IntArray: ...  # fmt: skip
@overload
def generate(
    model: GPT, ids: IdArray, max_new_tokens: int, *, return_logprobs: Literal[True],
    **options: Unpack[GenerateOptions],
) -> tuple[IntArray, FloatArray]: ...  # fmt: skip
@overload
def generate(
    model: GPT, ids: Sequence[IdRow], max_new_tokens: int, *, return_logprobs: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> TokenRows: ...  # fmt: skip
@overload
def generate(
    model: GPT, ids: Sequence[IdRow], max_new_tokens: int, *, return_logprobs: Literal[True],
    **options: Unpack[GenerateOptions],
) -> tuple[TokenRows, LogprobRows]: ...  # fmt: skip
def generate(
    model: GPT, ids: IdArray | Sequence[IdRow], max_new_tokens: int, *,
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
    repetition_penalty: float = 1.0, stop: Stop = None, stop_strings: StopStrings = None,
    tokenizer: Decoder | None = None, seed: Seed = None, num_beams: int = 1, length_penalty: float = 1.0,
    return_logprobs: bool = False, cache: ModelCache | None = None, progress: Progress = None,
) -> TokenRows | tuple[TokenRows, LogprobRows]:  # fmt: skip
    """The prompts and up to max_new_tokens ids behind each: ids (B, T) -> int64 (B, T + n); a list of rows of unequal
    length -> a list of lists. Every row is what it is alone, bit for bit.

    - The next id is chosen in this order, each filter on the renormalised rest: repetition_penalty (a seen id's logit
      is divided by it where positive, else multiplied; Keskar et al. 2019), temperature (0 is greedy, ties to the
      lowest id), top_k (exactly the k largest, ties to the lowest ids), top_p (while the mass before it is below p;
      Holtzman et al. 2020), min_p (at least that share of the largest probability; Nguyen et al. 2024), then one draw.
    - stop: an id or several; stop_strings: a text or several that end a row once its new text holds one
      (tokenizer.decode reads it). The row includes the id it ended with; in an array it goes on with that id until the
      last row has ended, in a list it simply ends.
    - seed: an int, or one for each row, which then is what it is in a run of its own; None draws one. Draw n of row i
      is a function of (seed, i, n) (Philox, Salmon et al. 2011).
    - num_beams > 1: beam search, the likeliest text that it finds (Hugging Face's rules): the sum of log-probabilities
      over (number of new ids) ** length_penalty is largest. It draws nothing: the options of sampling are refused.
    - return_logprobs=True: (rows, logprobs), the latter float32 (B, n), or a list of lists: the log-probability of each
      new id under the model itself, without penalty, temperature and filters; 0 where a row had ended.
    - cache: a gpt.new_cache(1) for one prompt. What it holds of the prompt's beginning is not computed again, and it
      holds the whole text but its last id afterwards (as far as its capacity and the context go).
    - progress: a function that is called with 1 for each new id of a row, of beam search for each step of a row: what
      moves a bar of B * max_new_tokens.

    Past block_size every id is computed from the last block_size ids anew. ValueError: a prompt without ids, a value
    out of its range, logits that hold NaN. IndexError: an id outside the vocabulary.
    """
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options |= {"repetition_penalty": repetition_penalty, "seed": seed}
    num_beams, length_penalty = check_beams(num_beams, length_penalty, options)
    told = _ignored if progress is None else progress
    if not callable(told):
        raise TypeError(message("generate", "progress must be a function of a number", quote(progress)))
    run = _Run(model, ids, max_new_tokens, options, (stop, stop_strings, tokenizer), return_logprobs, cache)
    new: list[list[int]] = [[] for _ in run.prompts]
    logprobs: list[list[float]] = [[] for _ in run.prompts]
    if num_beams > 1 and run.max_new_tokens:
        for row, prompt in enumerate(run.prompts):
            rows = Rows(model, [prompt], run.max_new_tokens, cache)
            width = num_beams, length_penalty
            new[row], logprobs[row] = beam_search(rows, run.max_new_tokens, *width, run.stops, row, told)
    else:
        for row, token, logprob in run.steps():
            new[row].append(token)
            logprobs[row].append(logprob)
            told(1)
    return _result(run, new, logprobs)


def _ignored(count: int) -> None:
    """Where nobody asks for progress."""


def _result(
    run: _Run, new: list[list[int]], logprobs: list[list[float]]
) -> TokenRows | tuple[TokenRows, LogprobRows]:
    rows = [prompt.tolist() + tokens for prompt, tokens in zip(run.prompts, new, strict=True)]
    if not run.return_logprobs:
        return filled(rows) if run.rectangle else rows
    if not run.rectangle:
        return rows, logprobs
    longest = max(len(row) for row in logprobs)
    return filled(rows), np.array([row + [0.0] * (longest - len(row)) for row in logprobs], np.float32)


@overload
def stream(
    model: GPT, ids: IdArray | Sequence[IdRow], max_new_tokens: int, *, return_logprobs: Literal[False] = False,
    **options: Unpack[StreamOptions],
) -> Iterator[int]: ...  # fmt: skip
@overload
def stream(
    model: GPT, ids: IdArray | Sequence[IdRow], max_new_tokens: int, *, return_logprobs: Literal[True],
    **options: Unpack[StreamOptions],
) -> Iterator[tuple[int, float]]: ...  # fmt: skip
def stream(
    model: GPT, ids: IdArray | Sequence[IdRow], max_new_tokens: int, *,
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
    repetition_penalty: float = 1.0, stop: Stop = None, stop_strings: StopStrings = None,
    tokenizer: Decoder | None = None, seed: Seed = None, return_logprobs: bool = False, cache: ModelCache | None = None,
) -> Iterator[int] | Iterator[tuple[int, float]]:  # fmt: skip
    """The new ids of one row, ids (1, T), one at a time and as soon as each is known, or (id, log-probability) pairs;
    what ends the row comes last. The options, the ids and the errors are those of generate.
    """
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options |= {"repetition_penalty": repetition_penalty, "seed": seed}
    run = _Run(model, ids, max_new_tokens, options, (stop, stop_strings, tokenizer), return_logprobs, cache)
    if len(run.prompts) != 1:
        raise ValueError(message("stream", "ids must be one row", f"{len(run.prompts)} rows", "(1, T)"))
    if run.return_logprobs:
        return ((token, logprob) for _, token, logprob in run.steps())
    return (token for _, token, _ in run.steps())


class _Run:
    """Everything that can be refused is refused here, before a generator exists or a cache is touched."""

    def __init__(
        self, model: GPT, ids: IdArray | Sequence[IdRow], max_new_tokens: int, options: dict[str, Any],
        stops: tuple[Stop, StopStrings, Decoder | None], return_logprobs: bool, cache: ModelCache | None,
    ) -> None:  # fmt: skip
        self.model, self.cache = model, cache
        self.max_new_tokens = check_integer("generate", "max_new_tokens", max_new_tokens, 0)
        self.return_logprobs = check_flag("generate", "return_logprobs", return_logprobs)
        self.sampling = check_sampling(**options)
        self.stops = Stops(model.cfg.vocab_size, *stops)
        self.prompts, self.rectangle = check_prompts(ids, model.cfg.vocab_size)
        seeds = self.sampling.seed
        if isinstance(seeds, tuple) and len(seeds) != len(self.prompts):
            rule = "seed must be one int, or one for each row"
            raise ValueError(message("generate", rule, f"{len(seeds)} for {len(self.prompts)} rows"))
        check_cache(model, cache, len(self.prompts), len(self.prompts[0]) + self.max_new_tokens)

    def steps(self) -> Iterator[tuple[int, int, float]]:
        """Yields (row, token, log-probability) of every row that has not ended, step after step; the last is 0.0 where
        it is not asked for."""
        if not self.max_new_tokens:
            return
        rows = Rows(self.model, self.prompts, self.max_new_tokens, self.cache)
        going = list(range(len(self.prompts)))  # the numbers of the rows that have not ended
        new: dict[int, list[int]] = {row: [] for row in going}
        seen = self._seen()
        for n in range(self.max_new_tokens):
            logits = rows.logits()
            for row, x in zip(going, logits, strict=True):
                token = next_token(x, self.sampling, row=row, n=n, seen=seen.get(row))
                new[row].append(token)
                yield row, token, float(log_softmax(x)[token]) if self.return_logprobs else 0.0
            staying = [place for place, row in enumerate(going) if not self.stops.met(new[row])]
            if not staying:
                return
            if len(staying) < len(going):
                going = [going[place] for place in staying]
                rows.choose(staying)
            rows.append([new[row][-1] for row in going])
            for row in seen.keys() & set(going):
                seen[row][new[row][-1]] = True

    def _seen(self) -> dict[int, NDArray[np.bool_]]:
        """Of each row, bool (V,): the ids that it holds; nothing where no penalty asks for it."""
        if self.sampling.repetition_penalty == 1:
            return {}
        seen = {row: np.zeros(self.model.cfg.vocab_size, bool) for row in range(len(self.prompts))}
        for row, prompt in enumerate(self.prompts):
            seen[row][prompt] = True
        return seen
