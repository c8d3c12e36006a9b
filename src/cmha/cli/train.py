"""cmha train: text in, a run's folder out."""

import os
import shutil
import sys

from cmha.cli.options import UsageError, filled, integer, not_negative, number, positive
from cmha.errors import message, quote, quote_path

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

The folder holds config.json and model.safetensors (GPT-2's layout), tokenizer_cmha.json, log.jsonl (a line per
evaluation: step, loss, val_loss, lr, grad_norm, tokens_per_second) and the two newest checkpoints. Ctrl-C ends the run
after its step and saves it; a second Ctrl-C ends it at once. A run that ends before its first save leaves no folder.
"""
RUN_FILES = ("config.json", "model.safetensors", "log.jsonl", "tokenizer_cmha.json", "checkpoints")
SAMPLE = 400  # tokens written at the end
SWITCH_VALUES = ("", "true", "false", "yes", "no", "on", "off", "0", "1")


def add_options(parser):
    parser.add_argument("text", nargs="*", metavar="TEXT", help="text files, UTF-8 (default: Python's documentation)")
    add = parser.add_argument_group("the run").add_argument
    add("--out", metavar="DIR", type=filled, help="folder to write (default: runs/001, runs/002, ...)")
    add("--steps", metavar="N", type=integer(1), default=5000, help="updates (default: %(default)s)")
    add("--batch-size", metavar="B", type=integer(1), default=8, help="windows in a step (default: %(default)s)")
    add(
        "--eval-interval", metavar="N", type=integer(1), default=500,
        help="steps between evaluations, each of which also saves (default: %(default)s)",
    )  # fmt: skip
    add(
        "--tokenizer", metavar="T", type=filled, default="char",
        help="char (the text's own characters), byte (256 byte values), or the folder of a run (default: %(default)s)",
    )  # fmt: skip
    add("--seed", metavar="N", type=integer(0), default=0, help="of weights, batches, dropout (default: %(default)s)")
    add("--threads", metavar="N", type=integer(1, 1024), help="threads of the kernels (default: all CPUs)")

    add = parser.add_argument_group("the model").add_argument
    add(
        "--preset", choices=("tiny", "char", "baby", "gpt2"), default="tiny",
        help="sizes to start from: tiny is 64 wide with 2 blocks, char 128 with 4, baby 384 with 6, gpt2 768 with 12 "
        "(default: %(default)s)",
    )  # fmt: skip
    add("--block-size", metavar="T", type=integer(1), help="context in tokens (default: the preset's)")
    add("--n-layer", metavar="L", type=integer(1), help="blocks (default: the preset's)")
    add("--n-head", metavar="H", type=integer(1), help="heads (default: the preset's)")
    add("--n-embd", metavar="D", type=integer(1), help="width, a multiple of the heads (default: the preset's)")
    add(
        "--dropout", metavar="P", type=number(lambda x: 0 <= x < 1, "at least 0 and below 1"), default=0.0,
        help="share of activations dropped in training (default: %(default)s)",
    )  # fmt: skip
    add(
        "--no-output-projection", dest="output_projection", action="store_false",
        help="leave out c_proj, the mixing of heads after attention",
    )  # fmt: skip

    add = parser.add_argument_group("the optimiser (AdamW)").add_argument
    add("--lr", metavar="X", type=positive, default=3e-3, help="highest learning rate (default: %(default)s)")
    add("--min-lr", metavar="X", type=not_negative, help="learning rate at the end (default: a tenth of --lr)")
    add(
        "--warmup-steps", metavar="N", type=integer(0),
        help="steps from 0 up to --lr, before the cosine down (default: 100, or a tenth of a short run)",
    )  # fmt: skip
    add("--weight-decay", metavar="X", type=not_negative, default=0.1, help="of matrices only (default: %(default)s)")
    add("--grad-clip", metavar="X", type=positive, default=1.0, help="longest gradient allowed (default: %(default)s)")


def run(args):
    from cmha import random, threads
    from cmha.gpt import GPT
    from cmha.text import corpora
    from cmha.train import Trainer
    from cmha.train.memory import check_memory
    from cmha.train.signals import HANGUP

    settings = _check(args)
    if args.threads is not None:
        threads.set_num_threads(args.threads)
    if args.out is not None:
        _refuse_a_run(args.out)
    text = corpora.read_texts(args.text) if args.text else corpora.default_text()
    tokenizer = _tokenizer(args.tokenizer, text)
    config = _config(args, tokenizer.vocab_size)
    check_memory(config, args.batch_size)
    training, validation = corpora.split(corpora.encode_text(tokenizer, text), config.block_size)
    random.manual_seed(args.seed)
    gpt = GPT(config)
    trainer = Trainer(gpt, training, validation, settings, tokenizer=tokenizer)
    trainer.folder, made = _claim(args.out)
    try:
        tokens = f"{len(training):,} tokens to learn from, {len(validation):,} to validate"
        _say(f"{gpt.num_parameters():,} parameters, {tokens}")
        number = trainer.run()
    finally:
        if not trainer.saved:
            _remove(trainer.folder, made, begun=trainer.saved is False)
    if number is not None:
        _say(f"stopped after step {trainer.step} of {settings.steps}; saved")
        if number != HANGUP:  # the terminal is gone
            print(trainer.folder)
        return 128 + number
    _say(f"done: validation loss {trainer.rows[-1]['val_loss']:.4f}; a sample:")
    print(_sample(gpt, tokenizer, int(training[0]), args.seed))
    print(trainer.folder)


def _check(args):
    """The settings; whatever does not fit together is wrong usage, before a file is opened."""
    from cmha.train import TrainSettings

    for path in args.text:
        if path.lower() in SWITCH_VALUES and not os.path.exists(path):
            raise UsageError(f"TEXT must be a file; got {path!r} (an on/off option takes no value)")
    if args.tokenizer not in ("char", "byte") and not os.path.isdir(args.tokenizer):
        raise UsageError(f"--tokenizer must be char, byte or a folder; got {quote(args.tokenizer)}")
    warmup_steps = min(100, args.steps // 10) if args.warmup_steps is None else args.warmup_steps
    min_lr = args.lr / 10 if args.min_lr is None else args.min_lr
    try:
        _config(args, 256)
        names = ("steps", "batch_size", "lr", "weight_decay", "grad_clip", "eval_interval", "seed")
        settings = {name: getattr(args, name) for name in names}
        return TrainSettings(**settings, min_lr=min_lr, warmup_steps=warmup_steps)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _config(args, vocab_size):
    from cmha.gpt import GPTConfig

    given = {name: getattr(args, name) for name in ("block_size", "n_layer", "n_head", "n_embd")}
    changes = {name: value for name, value in given.items() if value is not None}
    changes |= {"dropout": args.dropout, "output_projection": args.output_projection}
    return GPTConfig.preset(args.preset, vocab_size=vocab_size, **changes)


def _tokenizer(name, text):
    from cmha.text import ByteTokenizer, CharTokenizer, load_tokenizer

    return CharTokenizer(text) if name == "char" else ByteTokenizer() if name == "byte" else load_tokenizer(name)


def _refuse_a_run(folder):
    found = [name for name in RUN_FILES if os.path.lexists(os.path.join(folder, name))]
    if found:
        got = f"{quote_path(folder)} with {found[0]}"
        raise ValueError(message("train", "--out must not hold a run already", got))


def _claim(out):
    """(the run's folder, the folders made for it, innermost first); without --out the next number in runs/."""
    if out is not None:
        return out, _make_folders(out)
    made = _make_folders("runs")
    number = max((int(name) for name in os.listdir("runs") if name.isascii() and name.isdigit()), default=0)
    while True:
        number += 1
        folder = os.path.join("runs", f"{number:03d}")
        try:
            os.mkdir(folder)
            return folder, [folder, *made]
        except FileExistsError:  # another run took it just now
            continue


def _make_folders(path):
    made, at = [], os.path.abspath(path)
    while not os.path.lexists(at):
        made.append(at)
        at = os.path.dirname(at)
    os.makedirs(path, exist_ok=True)
    return made


def _remove(folder, made, begun):
    """A run that ends before its first save, or in it, leaves nothing behind: no number taken, no --out blocked."""
    for name in RUN_FILES if begun else ():  # none was there when the run began
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.unlink(path)
    for path in made:
        try:
            os.rmdir(path)
        except OSError:  # somebody else's files are in it
            break


def _sample(gpt, tokenizer, first, seed):
    """A piece of text by the model, from a new paragraph on where the tokenizer knows one."""
    try:
        start = tokenizer.encode("\n\n")
    except ValueError:
        start = [first]
    ids = gpt.generate([start], SAMPLE, temperature=0.8, seed=seed)[0]
    return tokenizer.decode(ids).strip("\n")


def _say(text):
    if sys.stderr is not None:
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:  # nobody reads it
            pass
