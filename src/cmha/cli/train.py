"""cmha train: text in, a run's folder out."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from cmha.cli import runs
from cmha.cli.options import (
    TOKENIZERS,
    Parser,
    UsageError,
    check_tokenizer,
    filled,
    integer,
    not_negative,
    number,
    positive,
)
from cmha.errors import listed, message, quote, quote_path

if TYPE_CHECKING:
    from cmha.gpt import GPTConfig
    from cmha.text import Tokenizer
    from cmha.train import Trainer, TrainSettings
    from cmha.train.accumulate import OneProcess
    from cmha.train.checkpoint import Checkpoint

DESCRIPTION = """\
Trains a GPT on text, character by character, and writes a folder that `cmha generate` and transformers open.

Without TEXT it learns the documentation that every Python carries (pydoc_data.topics, about 465,000 characters), so
nothing is downloaded. The last tenth of the text is kept for validation. A loss is the mean of -ln p over the true next
tokens: guessing among 103 characters is ln 103 = 4.6.
"""
EPILOG = """\
examples:
  cmha train                                  the default: less than a minute on two cores
  cmha train shakespeare.txt                  your own text; several files are joined in their order
  cmha train --steps 200 --eval-interval 100  a quick look
  cmha train --preset char --out runs/char    a larger model, into a folder of your choice
  cmha train --n-head 8 --seed 1              the same width cut into more heads
  cmha train a.txt --out runs/a --resume      begins, or goes on where it was: say the same after every crash
  cmha train --resume=runs/001 --steps 9000   a finished run goes on to more steps
  cmha train new.txt --init runs/001 --lr 3e-4            another text for a model that has learnt one
  cmha train a.txt --preset baby --micro-batch-size 8 --checkpoint-activations    more model than memory
  cmha train a.txt --overfit-one-batch --steps 200        can it learn at all? the loss must go to 0
  cmha train corpus.safetensors               ids of `cmha tokenize`, of nanoGPT or llm.c; larger than memory
  mpiexec -n 4 cmha train a.txt --micro-batch-size 2      four processes, the same bits (pip install 'cmha[mpi]')

The folder holds config.json and model.safetensors (GPT-2's layout), the tokenizer, log.jsonl (a line per evaluation:
step, loss, val_loss, lr, grad_norm, tokens_per_second) and checkpoints: the two newest and the one with the lowest
val_loss. Kill it whenever you like: after --resume every bit is as if nothing had happened, but for tokens_per_second,
which a clock says. There --steps, --threads, --eval-interval, --sample-interval and --checkpoint-activations may
change, what is not given is as it was, and TEXT must be what it was. Ctrl-C ends the run after its step and saves it; a
second Ctrl-C ends it at once. A run that ends before its first save leaves no folder. A disk that is full ends it with
what was saved before.
"""
SWITCH_VALUES = ("", "true", "false", "yes", "no", "on", "off", "0", "1")
MODEL = ("block_size", "n_layer", "n_head", "n_embd", "dropout", "output_projection")
SETTINGS = (
    "steps", "batch_size", "micro_batch_size", "lr", "min_lr", "schedule", "warmup_steps", "decay_steps",
    "weight_decay", "grad_clip", "eval_interval", "sample_interval", "seed", "overfit_one_batch",
    "checkpoint_activations",
)  # fmt: skip
FIXED_BY_INIT = ("preset", "n_layer", "n_head", "n_embd", "output_projection", "tokenizer", "vocab_size")


def add_options(parser: Parser) -> None:
    parser.optional_values = ("--resume",)
    parser.add_argument(
        "text", nargs="*", metavar="TEXT",
        help="text files, UTF-8, folders of them, or token files of `cmha tokenize` (default: Python's documentation)",
    )  # fmt: skip
    add = parser.add_argument_group("the run").add_argument
    add("--out", metavar="DIR", type=filled, help="folder to write (default: runs/001, runs/002, ...)")
    add(
        "--resume", metavar="PATH",
        help="without =PATH: go on with the run in --out (by default the newest in runs/) from its last whole "
        "checkpoint, or begin it; =PATH: with this run or checkpoint, and no other",
    )  # fmt: skip
    add("--steps", metavar="N", type=integer(1), help="updates (default: 5000; char 2000)")
    add(
        "--eval-interval", metavar="N", type=integer(1),
        help="steps between evaluations, each of which also saves (default: 500)",
    )  # fmt: skip
    add("--sample-interval", metavar="N", type=integer(1), help="steps between samples on stderr (default: none)")
    add("--seed", metavar="N", type=integer(0), help="of weights, batches, dropout (default: 0)")
    add("--threads", metavar="N", type=integer(1, 1024), help="threads of the kernels (default: all CPUs)")
    add(
        "--overfit-one-batch", action="store_true", default=None,
        help="learn the first batch again and again: a model that cannot get its loss to 0 has a fault",
    )  # fmt: skip

    add = parser.add_argument_group("the model").add_argument
    add(
        "--preset", choices=("tiny", "char", "baby", "gpt2"),
        help="sizes to start from: tiny is 64 wide with 2 blocks, char 128 with 4, baby 384 with 6, gpt2 768 with 12 "
        "(default: tiny)",
    )  # fmt: skip
    add(
        "--init", metavar="DIR", type=filled,
        help="start from the weights and the tokenizer in a folder: a run's, or Hugging Face's of a GPT-2",
    )  # fmt: skip
    add(
        "--tokenizer", metavar="T", type=filled,
        help="char (the text's own characters), byte (256 byte values), bpe (learnt from the text; "
        "pip install 'cmha[bpe]'), or the folder of a run (default: char, or what a token file brings)",
    )  # fmt: skip
    add("--vocab-size", metavar="V", type=integer(257, 2**24), help="of --tokenizer bpe (default: 4096)")
    add("--block-size", metavar="T", type=integer(1), help="context in tokens (default: the preset's)")
    add("--n-layer", metavar="L", type=integer(1), help="blocks (default: the preset's)")
    add("--n-head", metavar="H", type=integer(1), help="heads (default: the preset's)")
    add("--n-embd", metavar="D", type=integer(1), help="width, a multiple of the heads (default: the preset's)")
    add(
        "--dropout", metavar="P", type=number(lambda x: 0 <= x < 1, "at least 0 and below 1"),
        help="share of activations dropped in training (default: 0, or that of --init)",
    )  # fmt: skip
    add(
        "--no-output-projection", dest="output_projection", action="store_false", default=None,
        help="leave out c_proj, the mixing of heads after attention",
    )  # fmt: skip

    add = parser.add_argument_group("the batch").add_argument
    add("--batch-size", metavar="B", type=integer(1), help="windows in a step (default: 8; char 12, baby 64)")
    add(
        "--micro-batch-size", metavar="B", type=integer(1),
        help="windows that go through the model at a time, where a whole batch does not fit in memory; gradients are "
        "added in an order that depends on nothing else (default: --batch-size; gpt2 1)",
    )  # fmt: skip
    add("--grad-accumulation", metavar="N", type=integer(1), help="the same, as a number: micro-batches in a step")
    add(
        "--checkpoint-activations", action="store_true", default=None,
        help="run each block again in the backward pass instead of keeping its inside: a third more time, much less "
        "memory for long contexts, the same bits",
    )  # fmt: skip

    add = parser.add_argument_group("the optimiser (AdamW)").add_argument
    add("--lr", metavar="X", type=positive, help="highest learning rate (default: 0.003; baby 0.001, gpt2 0.0006)")
    add(
        "--schedule", choices=("cosine", "constant", "wsd"),
        help="after the warm-up: half a cosine down to --min-lr; constant; or constant with a straight line down over "
        "the last --decay-steps (default: cosine)",
    )  # fmt: skip
    add("--min-lr", metavar="X", type=not_negative, help="learning rate at the end (default: a tenth of --lr)")
    add(
        "--warmup-steps", metavar="N", type=integer(0),
        help="steps from 0 up to --lr (default: 100, or a tenth of a short run)",
    )  # fmt: skip
    add("--decay-steps", metavar="N", type=integer(0), help="of --schedule wsd (default: a fifth of --steps)")
    add("--weight-decay", metavar="X", type=not_negative, help="of matrices only (default: 0.1)")
    add("--grad-clip", metavar="X", type=positive, help="longest gradient allowed (default: 1)")


def run(args: Namespace) -> int | None:
    from cmha import threads
    from cmha.train import parallel

    _check(args)
    with parallel.start() as processes:
        if args.threads is not None:
            threads.set_num_threads(args.threads)
        return _train(args, processes)


def _train(args: Namespace, processes: OneProcess) -> int | None:
    from cmha.train.signals import HANGUP

    say = _say if processes.rank == 0 else lambda text: None
    checkpoint, out = processes.first(lambda: runs.find(args.resume, args.out, _say))
    if checkpoint is None:
        trainer = processes.together(lambda: _begin(args, out, processes))
    else:
        trainer = processes.together(lambda: _go_on(args, checkpoint, processes))
    begun = trainer.begun
    made: list[str] = []
    try:
        if checkpoint is None and processes.rank == 0:
            trainer.folder, made = runs.claim(out)
        corpus = trainer.corpus
        _tell_token_files(args.text, say)
        tokens = f"{len(corpus.training):,} tokens to learn from, {len(corpus.validation):,} to validate"
        say(f"{trainer.model.num_parameters():,} parameters, {tokens}")
        number = trainer.run()
    finally:
        if trainer.folder is not None and not trainer.saved and not begun:
            runs.remove(trainer.folder, made, begun=trainer.saved is False)
    if number is not None:
        say(f"stopped after step {trainer.step} of {trainer.settings.steps}{'; saved' if trainer.saved else ''}")
        if number != HANGUP and trainer.saved and processes.rank == 0:  # a closed terminal shows nothing
            print(trainer.folder)
        return 128 + number
    if processes.rank == 0:
        losses = [row["val_loss"] for row in trainer.rows[-1:]]
        say("done" + "".join(f": validation loss {loss:.4f}" for loss in losses) + "; a sample:")
        print(trainer.sample())
        print(trainer.folder)
    return None


def _given(args: Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _check(args: Namespace) -> None:
    """Whatever does not fit together is wrong usage, before a file is opened."""
    for path in args.text:
        if path == "-":  # the kind bpe, a resumed run and every process of several read a text again
            raise UsageError("TEXT must be files, which can be read again; got '-', standard input")
        if path.lower() in SWITCH_VALUES and not os.path.exists(path):
            raise UsageError(f"TEXT must be a file; got {path!r} (an on/off option takes no value)")
        run = _run_in(path)
        if run is not None:
            got = f"{quote_path(path)} of a run. To go on with it: --resume={run}"
            raise UsageError(f"TEXT must be texts or token files; got {got}")
    if args.resume and os.path.isfile(args.resume) and not args.resume.endswith(".safetensors"):
        raise UsageError(f"--resume=PATH must be a run's folder or a checkpoint; got {quote_path(args.resume)}")
    check_tokenizer(args)
    fixed = [f"--{name.replace('_', '-')}" for name in _given(args, FIXED_BY_INIT)]
    if args.init is not None and fixed:
        raise UsageError(f"--init brings model and tokenizer; got {fixed[0].replace('--output', '--no-output')} too")
    if args.init is not None and not os.path.isdir(args.init):
        raise UsageError(f"--init must be a folder; got {quote(args.init)}")
    try:
        if args.resume is None:
            _settings(args)
            if args.init is None:
                _config(args, 256)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _run_in(path: str) -> str | None:
    """What --resume= could go on from, if path is of a run or a model: `--resume PATH` reads as --resume and a TEXT."""
    place, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(path):
        checkpoint = os.path.basename(place) == "checkpoints" and name.startswith("step-")
        return path if checkpoint else None
    names = os.listdir(path)
    if name == "checkpoints" and any(file.startswith("step-") for file in names):
        return os.path.dirname(os.path.normpath(path)) or os.curdir
    weights = any(file.endswith(".safetensors") for file in names)
    return path if "checkpoints" in names or ("config.json" in names and weights) else None


def _settings(args: Namespace) -> TrainSettings:
    from cmha.train.settings import PRESETS, TrainSettings

    preset = args.preset or "tiny"
    given = _given(args, SETTINGS)
    if args.grad_accumulation is not None:
        usual = PRESETS[preset].get("batch_size", TrainSettings.batch_size)
        given |= _micro_batches(args, given.get("batch_size", usual))
    return TrainSettings.preset(preset, **given)


def _micro_batches(args: Namespace, batch_size: int) -> dict[str, int]:
    """--grad-accumulation N as the sizes of batch and micro-batch."""
    N, size = args.grad_accumulation, args.micro_batch_size
    if size is not None and args.batch_size is None:
        batch_size = N * size
    if batch_size % N or size not in (None, batch_size // N):
        got = f"{batch_size} windows in {N} micro-batches" + (f" of {size}" if size is not None else "")
        raise UsageError(f"--grad-accumulation must cut --batch-size into equal micro-batches; got {got}")
    return {"batch_size": batch_size, "micro_batch_size": batch_size // N}


def _config(args: Namespace, vocab_size: int) -> GPTConfig:
    from cmha.gpt import GPTConfig

    return GPTConfig.preset(args.preset or "tiny", vocab_size=vocab_size, **_given(args, MODEL))


# ------------------------------------------------------------------------------------------ a new run
def _begin(args: Namespace, out: str | None, processes: OneProcess) -> Trainer:
    from cmha import random
    from cmha.gpt import GPT
    from cmha.text.corpora import open_data
    from cmha.train import Trainer, run_folder
    from cmha.train.memory import check_memory

    begun = args.resume is not None
    if out is not None:
        run_folder.refuse_a_run(out, begun)
    settings = _settings(args)
    if args.init is None:
        tokenizer, block_size = _tokenizer(args), _config(args, 256).block_size
    else:
        tokenizer, start = _initial(args)
        block_size = start.block_size
    corpus = open_data(args.text, tokenizer, block_size)
    vocab_size = cast("Tokenizer", corpus.tokenizer).vocab_size  # open_data's corpus has one
    config = _config(args, vocab_size) if args.init is None else start
    check_memory(config, settings, processes)
    random.manual_seed(settings.seed)
    with nullcontext() if args.init is None else random.no_init():
        model = GPT(config)
    if args.init is not None:
        whole = GPT.from_pretrained(args.init)
        whole.crop_block_size(block_size)
        model.load_state_dict(whole.state_dict())
    trainer = Trainer(model, corpus, settings, processes=processes)
    trainer.begun = begun and out is not None and os.path.exists(out)
    return trainer


def _initial(args: Namespace) -> tuple[Tokenizer, GPTConfig]:
    """(tokenizer, config) of --init, with what the options change."""
    from dataclasses import replace

    from cmha.gpt.pretrained import CONFIG, read_config
    from cmha.text import load_tokenizer

    config, tokenizer = read_config(os.path.join(args.init, CONFIG)), load_tokenizer(args.init)
    if tokenizer.vocab_size > config.vocab_size:
        got = f"{tokenizer.vocab_size} and {config.vocab_size} in {quote_path(args.init)}"
        raise ValueError(message("train", "the model's vocabulary must hold every id of the tokenizer", got))
    if args.block_size is not None and args.block_size > config.block_size:
        got = f"{args.block_size} for {config.block_size} in {quote_path(args.init)}"
        raise ValueError(message("train", "--block-size can only shrink the context of --init", got))
    return tokenizer, replace(config, **_given(args, ("block_size", "dropout")))


def _tokenizer(args: Namespace) -> Tokenizer | str | None:
    """A tokenizer, or what open_data makes one of."""
    if args.tokenizer == "bpe":
        from cmha.text.corpora import Texts, default_text, make_tokenizer

        return make_tokenizer("bpe", Texts(args.text) if args.text else [default_text()], args.vocab_size)
    name: str | None = args.tokenizer
    if name is None or name in TOKENIZERS:
        return name
    from cmha.text import load_tokenizer

    return load_tokenizer(name)


# ------------------------------------------------------------------------------------------ a run that goes on
def _go_on(args: Namespace, checkpoint: Checkpoint, processes: OneProcess) -> Trainer:
    from cmha.gpt import GPTConfig
    from cmha.text import load_tokenizer
    from cmha.text.corpora import open_data
    from cmha.train import Trainer
    from cmha.train.checkpoint import tokenizer_dict
    from cmha.train.memory import check_memory
    from cmha.train.settings import MAY_CHANGE

    given = _given(args, SETTINGS)
    if args.grad_accumulation is not None:
        given |= _micro_batches(args, given.get("batch_size", checkpoint.settings["batch_size"]))
    changes = {name: given.pop(name) for name in MAY_CHANGE if name in given}
    if args.preset is not None:
        config = vars(_config(args, 256))
        given |= {name: config[name] for name in ("block_size", "n_layer", "n_head", "n_embd")}
    given |= _given(args, MODEL)
    tokenizer = checkpoint.load_tokenizer()
    if args.tokenizer in TOKENIZERS:
        given |= {"tokenizer_type": args.tokenizer} | _given(args, ("vocab_size",))
    elif args.tokenizer is not None:
        given["tokenizer"] = tokenizer_dict(load_tokenizer(args.tokenizer))
    try:
        corpus = open_data(args.text, tokenizer, checkpoint.config["block_size"])
    except ValueError as error:  # other data, for the most part; what the options say against it comes first
        checkpoint.check(given)
        raise ValueError(f"{error}. A run goes on with the TEXT it began with") from error
    checkpoint.check(given | {"data": corpus.sha256})
    check_memory(GPTConfig(**checkpoint.config), checkpoint.settings_with(changes), processes)
    trainer = Trainer.from_checkpoint(checkpoint, corpus, changes, processes=processes)
    if processes.rank == 0:
        _say(f"going on after step {trainer.step} of {trainer.settings.steps} in {trainer.folder}")
    return trainer


def _tell_token_files(paths: list[str], say: Callable[[str], None]) -> None:
    """A folder with token files stands for these alone: who put texts beside them should know."""
    from cmha.text.token_files import tokens_in_folder

    for path in paths:
        found = tokens_in_folder(path)
        if found != [path]:
            names = listed(os.path.basename(file) for file in found)
            say(f"of the folder {quote_path(path)} only its token files: {names}")


def _say(text: str) -> None:
    if sys.stderr is not None:
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:  # nobody reads it
            pass
