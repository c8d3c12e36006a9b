"""A run that is killed, or whose disk fails, at any moment: the last checkpoint stays, and going on gives equal bytes.

F1 to F4b by fault injection of strace, F2 and P5 by real signals at random times, P6 by limits of the system.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cmha.train import Trainer
from cmha.train.checkpoint import newest

from . import saving
from .checking import SANITIZED, needs_linux

resource = pytest.importorskip("resource")  # not on Windows
ROOT = Path(__file__).resolve().parent.parent
WHEN = {"write": 40, "fsync": 20, "rename": 10, "unlink": 5}  # more calls of a kind than a save makes
TEXT = "the cat sat on the mat, and the dog did not.\n" * 60
SMALL = ["--n-layer", "1", "--n-embd", "8", "--n-head", "2", "--block-size", "12"]


def strace_works():
    if shutil.which("strace") is None:
        return False
    command = ["strace", "-f", "-qq", "-o", os.devnull, "-e", "trace=write", "-e", "inject=write:retval=7:when=1"]
    return subprocess.run([*command, "true"], capture_output=True).returncode == 0


needs_strace = pytest.mark.skipif(not strace_works(), reason="strace is not here, or may not trace")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with `whole`, a run of four steps, and `begun`, the same stopped after two."""
    folder = tmp_path_factory.mktemp("crash")
    saving.trainer(folder / "whole").run()
    run = saving.trainer(folder / "begun")
    step = run._train_step

    def signalled():
        step()
        if run.step == 3:
            raise EOFError

    run._train_step = signalled
    with pytest.raises(EOFError):
        run.run()
    return folder


def traced(runs, tmp_path, kind, fault, from_then_on=""):
    """The ends of a save whose every call of that kind was struck in turn: -9, 3 (an OSError), or 0 after the last.

    What each of them leaves is whole, old or new, and going on gives the files of a run that nothing stopped.
    """
    names = {"rename": "rename,renameat,renameat2", "unlink": "unlink,unlinkat"}.get(kind, kind)
    program = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={names}"]
    program += ["-e", f"inject={names}:{fault}:when={WHEN[kind]}{from_then_on}"]
    program += [sys.executable, "-m", "tests.saving", str(tmp_path), kind, str(WHEN[kind])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TMPDIR": str(tmp_path)}
    done = subprocess.run(program, cwd=runs, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr
    ends, whole = json.loads(done.stdout), saving.contents(runs / "whole")
    before = (runs / "begun" / "checkpoints" / "step-2.safetensors").read_bytes()
    seen = []
    for number in range(1, len(ends) + 1):
        folder = tmp_path / str(number)
        checkpoint, damaged = newest(folder)
        assert damaged == [] and checkpoint.step in (2, 3)
        assert (folder / "checkpoints" / "step-2.safetensors").read_bytes() == before
        left = {name: data for name, data in saving.contents(folder).items() if ".tmp-" not in name}
        if left not in seen:  # many calls leave the same
            seen.append(left)
            Trainer.resume(folder, saving.CORPUS, progress=False).run()
            assert saving.contents(folder) == whole, f"{kind} {number}"
    return ends


@needs_strace
@pytest.mark.parametrize("kind, least", [("write", 8), ("fsync", 8), ("rename", 4), ("unlink", 1)])
def test_f1_killed_at_every_call_of_a_save(kind, least, runs, tmp_path):
    ends = traced(runs, tmp_path, kind, "signal=SIGKILL")
    assert ends[-1] == 0 and set(ends[:-1]) == {-9} and len(ends) > least


@needs_strace
@pytest.mark.parametrize(
    "kind, fault",
    [
        ("write", "ENOSPC"), ("fsync", "EIO"), ("rename", "EXDEV"),
        *(pytest.param("write", fault, marks=pytest.mark.full) for fault in ("EIO", "EDQUOT")),
    ],
)  # fmt: skip
def test_f3_a_disk_that_fails_from_a_call_on_leaves_the_old_checkpoint_and_no_temp(kind, fault, runs, tmp_path):
    ends = traced(runs, tmp_path, kind, f"error={fault}", "+")
    assert ends[-1] == 0 and set(ends[:-1]) == {saving.FAILED} and len(ends) > 4


@needs_strace
def test_f4_a_disk_that_loses_a_write_is_noticed_before_the_rename(runs, tmp_path):
    ends = traced(runs, tmp_path, "write", "retval=20")
    assert ends[-1] == 0 and set(ends[:-1]) == {saving.FAILED} and len(ends) > 8


@needs_strace
def test_f4b_the_order_of_a_save(runs, tmp_path):
    """Of every file: all writes, fsync, rename, fsync of its folder; the log before, the checkpoint last."""
    shutil.copytree(runs / "begun", tmp_path / "run")
    log = tmp_path / "calls"
    calls = "write,fsync,rename,renameat,renameat2"
    work = "import sys; from tests import saving; sys.exit(saving.save(sys.argv[1]))"
    program = ["strace", "-f", "-y", "-qq", "-s", "0", "-o", log, "-e", f"trace={calls}", sys.executable, "-c", work]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TMPDIR": "/tmp"}
    subprocess.run([*map(str, program), str(tmp_path / "run")], env=environment, check=True)
    here, events = str(tmp_path / "run"), []
    for line in log.read_text().splitlines():
        if here in line:
            name = re.search(r"\d+ +(\w+?)(?:at2?)?\(", line)[1]
            paths = re.findall(rf"[<\"]{re.escape(here)}/?(.*?)[>\"]", line)
            if (name, paths) != (events or [None])[-1]:  # several writes in a row are one
                events.append((name, paths))
    expected, places = [("write", ["log.jsonl"]), ("fsync", ["log.jsonl"])], []
    for name, paths in events:
        if name == "rename":
            temp, target = paths
            place, _, name = target.rpartition("/")
            assert re.fullmatch(rf"\.{re.escape(name)}\.tmp-\d+", temp.removeprefix(place).lstrip("/"))
            expected += [("write", [temp]), ("fsync", [temp]), ("rename", paths), ("fsync", [place])]
            places.append(target)
    assert events == expected
    assert places == ["tokenizer_cmha.json", "model.safetensors", "config.json", "checkpoints/step-3.safetensors"]


# ------------------------------------------------------------------------------------------ the whole command
def command(*arguments, limit=None, **options):
    """cmha with its main thread's limits set, as a process."""
    set_limit = None if limit is None else (lambda: resource.setrlimit(limit[0], (limit[1], limit[1])))
    program = [sys.executable, "-m", "cmha", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(program, stdout=-1, stderr=-1, env=environment, preexec_fn=set_limit, **options)


def finished(*arguments, **options):
    """(exit code, last line on stderr) of cmha."""
    with command(*arguments, **options) as process:
        _, error = process.communicate(timeout=120)
    assert b"Traceback" not in error
    return process.returncode, error.decode().splitlines()[-1]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(TEXT)
    return path


def killed_at_random_times(kills, text, tmp_path):
    """Restarts one command after each kill; at each end its files are compared, and a new run begins."""
    rng = np.random.default_rng(9)
    options = ["train", text, *SMALL, "--steps", 60, "--eval-interval", 2, "--dropout", 0.1, "--micro-batch-size", 3]
    start = time.monotonic()
    assert finished(*options, "--out", tmp_path / "whole")[0] == 0
    length = time.monotonic() - start
    whole, folder, killed, ends = saving.contents(tmp_path / "whole"), tmp_path / "run", 0, 0
    while killed < kills or not ends:
        with command(*options, "--out", folder, "--resume") as process:
            try:
                process.wait(rng.uniform(0, length) if killed < kills else None)
            except subprocess.TimeoutExpired:
                process.kill()
                killed += 1
                continue
            assert process.returncode == 0, process.stderr.read()
        assert saving.contents(folder) == whole
        shutil.rmtree(folder)
        ends += 1


def test_f2_killed_at_random_times(text, tmp_path):
    killed_at_random_times(6, text, tmp_path)


@pytest.mark.full
def test_f2_killed_at_300_random_times(text, tmp_path):
    killed_at_random_times(300, text, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_p5_signals_at_20_random_times(number, code, text, tmp_path):
    rng = np.random.default_rng(int(number))
    options = ["train", text, *SMALL, "--steps", 10**6, "--eval-interval", 20, "--out", tmp_path / "run", "--resume"]
    reached = 0
    for _ in range(20):
        with command(*options) as process:
            time.sleep(rng.uniform(0.6, 2.0))
            start = time.monotonic()
            process.send_signal(number)
            _, error = process.communicate(timeout=60)
        assert process.returncode == code and b"Traceback" not in error, error
        assert time.monotonic() - start < 10
        if (tmp_path / "run").exists():
            checkpoint, damaged = newest(tmp_path / "run")
            assert damaged == [] and checkpoint.step >= reached
            reached = checkpoint.step
    assert reached > 0


SLOW = """
import sys, time
from cmha.cli import main
from cmha.train.trainer import Trainer
step = Trainer._train_step
def slow(self):
    if self.step == 3:
        print("busy", flush=True)
        time.sleep(60)
    step(self)
Trainer._train_step = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_p5_a_second_signal_leaves_at_once_and_the_last_checkpoint_stays(number, code, text, tmp_path):
    program = [sys.executable, "-c", SLOW, "train", text, *SMALL, "--eval-interval", "2", "--out", tmp_path / "run"]
    with subprocess.Popen(list(map(str, program)), stdout=-1, stderr=-1) as process:
        assert process.stdout.readline() == b"busy\n"
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)  # it finishes its step
        process.send_signal(number)
        _, error = process.communicate(timeout=20)
    assert process.returncode == code and b"Traceback" not in error
    checkpoint, damaged = newest(tmp_path / "run")
    assert checkpoint.step == 2 and damaged == []


def test_f3_a_file_size_limit_ends_the_run_with_the_old_checkpoint(text, tmp_path):
    options = ["train", text, *SMALL, "--eval-interval", 2, "--out", tmp_path / "run"]
    assert finished(*options, "--steps", 2)[0] == 0
    before = saving.contents(tmp_path / "run")
    size = (tmp_path / "run" / "model.safetensors").stat().st_size + 1000  # too little for a checkpoint
    code, line = finished(*options, "--steps", 4, "--resume", limit=(resource.RLIMIT_FSIZE, size))
    assert code == 1 and line.startswith("cmha: error: File too large: ") and "step-4.safetensors" in line
    name = "checkpoints/step-2.safetensors"
    assert saving.contents(tmp_path / "run")[name] == before[name]
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if "tmp" in name]
    assert finished(*options, "--steps", 4, "--resume")[0] == 0  # and goes on when there is room


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_f3_a_full_disk_and_a_read_only_one(small_disk, text):
    options = ["train", text, *SMALL, "--eval-interval", 2]
    run = ["--out", small_disk / "run", "--resume"]
    assert finished(*options, *run, "--steps", 2)[0] == 0
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize - 12000))  # less than a checkpoint needs
    code, line = finished(*options, *run, "--steps", 4)
    assert code == 1 and line.startswith("cmha: error: No space left on device: ") and str(small_disk) in line
    checkpoint, damaged = newest(small_disk / "run")
    assert damaged == [] and checkpoint.step == 2
    assert not [name for _, _, names in os.walk(small_disk) for name in names if "tmp" in name]
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for out in ([*run, "--steps", 4], ["--out", small_disk / "new", "--steps", 2]):
        code, line = finished(*options, *out)
        assert code == 1 and line.startswith("cmha: error: Read-only file system: ")
    assert newest(small_disk / "run")[0].step == 2


@needs_linux
@pytest.mark.skipif(SANITIZED, reason="a sanitizer takes address space by the terabyte")
def test_p6_memory_that_runs_out_is_one_line_and_no_folder(text, tmp_path):
    """The estimate is asked for what the system has, which knows nothing of a limit of this process."""
    sizes = ["--steps", 1, "--n-layer", 2, "--n-embd", 256, "--n-head", 2, "--block-size", 128, "--batch-size", 64]
    limit = (resource.RLIMIT_AS, 400 << 20)
    code, line = finished("train", text, *sizes, "--out", tmp_path / "run", limit=limit)
    assert code == 1 and re.match(r"cmha: error: .*cannot allocate [\d.]+ [KMG]iB", line)
    assert not (tmp_path / "run").exists()


def test_two_processes_on_one_folder(text, tmp_path):
    """While one trains, another is refused; the first is not disturbed."""
    options = ["train", text, *SMALL, "--eval-interval", 1, "--out", tmp_path / "run", "--resume"]
    with command(*options, "--steps", 10**6) as first:
        while not (tmp_path / "run" / "checkpoints").exists() and first.poll() is None:
            time.sleep(0.02)
        second = finished(*options, "--steps", 10**6)
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 143
    assert second[0] == 1 and "one run at a time may use a folder" in second[1]
    assert newest(tmp_path / "run")[1] == []
    assert not [name for name in os.listdir(tmp_path / "run") if "lock" in name or "tmp" in name]


def test_a_trainer_is_what_the_child_resumes(runs):
    """What the other tests stand on: begun plus two steps is whole."""
    shutil.copytree(runs / "begun", runs / "again")
    Trainer.resume(runs / "again", saving.CORPUS, progress=False).run()
    assert saving.contents(runs / "again") == saving.contents(runs / "whole")
