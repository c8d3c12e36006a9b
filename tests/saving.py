"""The child of tests/test_crash.py: saves while strace kills it, or fails its calls, at call number WHEN of a kind.

strace counts for each process by itself, and a process can make calls that do nothing. So one strace serves every call
of a save: of forked children, number k makes WHEN - k calls for nothing and then saves, in FOLDER/k.

    strace -f -e inject=KIND:...:when=WHEN  python -m tests.saving FOLDER KIND WHEN
"""

import json
import os
import shutil
import sys
import tempfile

import numpy as np
from tqdm import tqdm

import cmha
from cmha.text import CharTokenizer
from cmha.text.corpora import Corpus
from cmha.train import Trainer, TrainSettings

IDS = np.random.default_rng(2).integers(0, 11, 500)
CORPUS = Corpus.from_ids(IDS[:400], IDS[400:], CharTokenizer("abcdefghijk"))
FAILED = 3
WAVE = 4


def trainer(folder):
    cmha.manual_seed(8)
    model = cmha.GPT(cmha.GPTConfig(vocab_size=11, block_size=7, n_layer=1, n_head=2, n_embd=12, dropout=0.2))
    return Trainer(model, CORPUS, TrainSettings(steps=4, batch_size=3, eval_interval=1), folder, progress=False)


def contents(folder):
    """{path: bytes}, the log without what a clock says."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(place, name), "rb") as file:
                found[os.path.relpath(os.path.join(place, name), folder)] = file.read()
    rows = [json.loads(line) for line in found["log.jsonl"].splitlines()]
    found["log.jsonl"] = [{**row, "tokens_per_second": 0} for row in rows]
    return found


def call(kind):
    """One system call that changes nothing."""
    with open(os.devnull, "wb", buffering=0) as sink:
        try:
            if kind == "write":
                os.write(sink.fileno(), b"x")
            elif kind == "fsync":
                os.fsync(sink.fileno())
            elif kind == "rename":
                os.rename("/none/a", "/none/b")
            else:
                os.unlink("/none/a")
        except OSError:  # a device has nothing to sync, and these files are not there
            pass


def forked(work, *arguments):
    """A child of its own that does work(*arguments)."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work(*arguments) or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(99)
    return child


def save(folder):
    """One step and its save, from step 2 to 3."""
    try:
        run = Trainer.resume(folder, CORPUS, progress=False)
        whole_save = run._save

        def stop(row):
            whole_save(row)
            raise EOFError

        run._save = stop
        run.run()
    except EOFError:
        return 0
    except OSError as error:
        assert error.errno and error.strerror, error
        left = [name for _, _, names in os.walk(folder) for name in names if "tmp" in name]
        assert not left, left
        return FAILED


def main(folder, kind, when):
    cmha.set_num_threads(1)
    tempfile.gettempdir(), tqdm.get_lock()  # both write when they are first asked for
    ends, children = [], []

    def work(number, here):
        for _ in range(when - number):
            call(kind)
        return save(here)

    for number in range(1, when):
        here = os.path.join(folder, str(number))
        shutil.copytree("begun", here)
        children.append(forked(work, number, here))
        if len(children) == WAVE or number == when - 1:  # a few at once: much of a save is waiting for the disk
            ends += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            children = []
            if 0 in ends:
                break
    print(json.dumps(ends[: ends.index(0) + 1] if 0 in ends else ends))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
