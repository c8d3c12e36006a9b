"""The loop around the model: whole rows (generate) or one id at a time (stream)."""

import numpy as np

from cmha.errors import check_flag, check_integer, message
from cmha.generate.beam import beam_search, check_beams
from cmha.generate.rows import Rows, check_prompts
from cmha.generate.sampling import check_sampling, log_softmax, next_token
from cmha.generate.stops import Stops, check_cache, filled


def generate(
    model, ids, max_new_tokens, *,
    temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0, stop=None, stop_strings=None,
    tokenizer=None, seed=None, num_beams=1, length_penalty=1.0, return_logprobs=False, cache=None,
):  # fmt: skip
    """The prompts and up to max_new_tokens ids behind each: ids (B, T) -> int64 (B, T + n); a list of rows of unequal
    length -> a list of lists. Every row is what it is alone, bit for bit.

    temperature (0 is greedy), top_k, top_p, min_p, repetition_penalty: see cmha/generate/sampling.py, which has the
    rules and their order. stop: an id or several; stop_strings: a text or several that end a row once its new text
    holds one (tokenizer.decode reads it). The row includes the id it ended with; in an array it goes on with that id
    until the last row has ended, in a list it simply ends. seed: an int, or one for each row, which then is what it is
    in a run of its own; None draws one.

    num_beams > 1: beam search, the likeliest text that it finds (Hugging Face's rules): the sum of log-probabilities
    over (number of new ids) ** length_penalty is largest. It draws nothing: the options of sampling are refused.

    return_logprobs=True: (rows, logprobs), the latter float32 (B, n), or a list of lists: the log-probability of each
    new id under the model itself, without penalty, temperature and filters; 0 where a row had ended.

    cache: a gpt.new_cache(1) for one prompt. What it holds of the prompt's beginning is not computed again, and it
    holds the whole text but its last id afterwards (as far as its capacity and the context go).
    """
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options |= {"repetition_penalty": repetition_penalty, "seed": seed}
    num_beams, length_penalty = check_beams(num_beams, length_penalty, options)
    run = _Run(model, ids, max_new_tokens, options, (stop, stop_strings, tokenizer), return_logprobs, cache)
    new, logprobs = [[] for _ in run.prompts], [[] for _ in run.prompts]
    if num_beams > 1 and run.max_new_tokens:
        for row, prompt in enumerate(run.prompts):
            rows = Rows(model, [prompt], run.max_new_tokens, cache)
            new[row], logprobs[row] = beam_search(rows, run.max_new_tokens, num_beams, length_penalty, run.stops, row)
    else:
        for row, token, logprob in run.steps():
            new[row].append(token)
            logprobs[row].append(logprob)
    return _result(run, new, logprobs)


def _result(run, new, logprobs):
    rows = [prompt.tolist() + tokens for prompt, tokens in zip(run.prompts, new, strict=True)]
    if not run.return_logprobs:
        return filled(rows) if run.rectangle else rows
    if not run.rectangle:
        return rows, logprobs
    longest = max(len(row) for row in logprobs)
    return filled(rows), np.array([row + [0.0] * (longest - len(row)) for row in logprobs], np.float32)


def stream(
    model, ids, max_new_tokens, *,
    temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0, stop=None, stop_strings=None,
    tokenizer=None, seed=None, return_logprobs=False, cache=None,
):  # fmt: skip
    """The new ids of one row, ids (1, T), one at a time and as soon as each is known, or (id, log-probability) pairs;
    what ends the row comes last. The options, and the ids, are those of generate."""
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options |= {"repetition_penalty": repetition_penalty, "seed": seed}
    run = _Run(model, ids, max_new_tokens, options, (stop, stop_strings, tokenizer), return_logprobs, cache)
    if len(run.prompts) != 1:
        raise ValueError(message("stream", "ids must be one row", f"{len(run.prompts)} rows", "(1, T)"))
    return ((token, logprob) if run.return_logprobs else token for _, token, logprob in run.steps())


class _Run:
    """Everything that can be refused is refused here, before a generator exists or a cache is touched."""

    def __init__(self, model, ids, max_new_tokens, options, stops, return_logprobs, cache):
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

    def steps(self):
        """Yields (row, token, log-probability or None) of every row that has not ended, step after step."""
        if not self.max_new_tokens:
            return
        rows = Rows(self.model, self.prompts, self.max_new_tokens, self.cache)
        going = list(range(len(self.prompts)))  # the numbers of the rows that have not ended
        new, seen = {row: [] for row in going}, self._seen()
        for n in range(self.max_new_tokens):
            logits = rows.logits()
            for row, x in zip(going, logits, strict=True):
                token = next_token(x, self.sampling, row=row, n=n, seen=seen.get(row))
                new[row].append(token)
                yield row, token, float(log_softmax(x)[token]) if self.return_logprobs else None
            staying = [place for place, row in enumerate(going) if not self.stops.met(new[row])]
            if not staying:
                return
            if len(staying) < len(going):
                going = [going[place] for place in staying]
                rows.choose(staying)
            rows.append([new[row][-1] for row in going])
            for row in seen.keys() & set(going):
                seen[row][new[row][-1]] = True

    def _seen(self):
        """Of each row, bool (V,): the ids that it holds; nothing where no penalty asks for it."""
        if self.sampling.repetition_penalty == 1:
            return {}
        seen = {row: np.zeros(self.model.cfg.vocab_size, bool) for row in range(len(self.prompts))}
        for row, prompt in enumerate(self.prompts):
            seen[row][prompt] = True
        return seen
