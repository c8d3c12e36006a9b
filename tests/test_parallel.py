"""Several processes under mpiexec: the same bytes as one, one who writes, one message when something fails (T7, D8)."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from cmha.train.accumulate import Gradients, OneProcess, share, tree_sum

MPIEXEC = shutil.which("mpiexec") or shutil.which("mpiexec", path=os.path.dirname(sys.executable))
TEXT = "the cat sat on the mat, and the dog did not; nobody saw the bird.\n" * 40
SMALL = [
    "--n-layer", "1", "--n-embd", "8", "--n-head", "2", "--block-size", "12", "--batch-size", "7",
    "--micro-batch-size", "1", "--dropout", "0.1", "--eval-interval", "3",
]  # fmt: skip


def needs_mpi():
    pytest.importorskip("mpi4py", reason="the extra `mpi`")
    if MPIEXEC is None:
        pytest.skip("no mpiexec on the path or beside Python")


def command(count, *arguments):
    return [MPIEXEC, "-n", str(count), sys.executable, "-W", "error", "-m", "cmha", "train", *map(str, arguments)]


def environment(**more):
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


def finished(count, *arguments, code=0, **options):
    """(stdout, stderr) of a run that ends with that code."""
    options.setdefault("env", environment())
    options.setdefault("timeout", 240)
    done = subprocess.run(command(count, *arguments), capture_output=True, text=True, **options)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def errors(text):
    return [line for line in text.splitlines() if "error" in line.lower()]


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "log.jsonl"
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(text, folder of the run that a process without MPI made of it, seven micro-batches a step)"""
    from cmha.cli import main

    folder = tmp_path_factory.mktemp("parallel")
    (folder / "a.txt").write_text(TEXT)
    assert main(["train", str(folder / "a.txt"), "--steps", "6", "--out", str(folder / "alone"), *SMALL]) == 0
    return folder / "a.txt", folder / "alone"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9])
def test_d8_shares_are_subtrees_so_their_sums_meet_in_the_same_tree(count):
    """Sums of numbers that float32 rounds: the tree of one process, and that of 1, 2, 4, 8 with what they own."""
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32) * 10.0 ** np.arange(count)

    class Sum(Gradients):
        def add(self, right):
            self.loss = np.float32(self.loss) + np.float32(right.loss)
            return self

    def leaf(number):
        return Sum(values[number].astype(np.float32), [])

    whole = tree_sum(0, count, leaf).loss
    for size in (1, 2, 4, 8):
        if size > count:
            with pytest.raises(ValueError, match=f"{size} processes and {count} micro-batches"):
                share(count, 0, size)
            continue
        spans = [share(count, rank, size) for rank in range(size)]
        assert [first for first, _ in spans] + [count] == [0] + [stop for _, stop in spans]
        sums = [tree_sum(*span, leaf) for span in spans]
        while len(sums) > 1:
            sums = [left.add(right) for left, right in zip(sums[0::2], sums[1::2], strict=True)]
        assert np.float32(sums[0].loss).tobytes() == np.float32(whole).tobytes()
    with pytest.raises(ValueError, match="power of two"):
        share(9, 0, 3)


def test_the_face_of_one_process_is_that_of_several():
    from cmha.train.parallel import MPIProcesses

    public = {name for name in vars(OneProcess) if not name.startswith("_")} - {"rank", "size", "here"}
    assert public == {name for name in vars(MPIProcesses) if not name.startswith("_")}


@pytest.mark.parametrize("count", [2, 4])
def test_d8_the_files_are_those_of_one_process(alone, tmp_path, count):
    """model.safetensors, checkpoints, tokenizer, config; dropout and a last micro-batch of another owner included."""
    needs_mpi()
    text, folder = alone
    out, told = finished(count, text, "--steps", 6, "--out", tmp_path / "run", *SMALL)
    assert digests(tmp_path / "run") == digests(folder)
    assert out.splitlines()[-1] == str(tmp_path / "run") and told.count("tokens to learn from") == 1
    assert (tmp_path / "run" / "log.jsonl").read_text().count("\n") == 2


def test_t2_a_run_goes_on_with_another_number_of_processes(alone, tmp_path):
    needs_mpi()
    text, folder = alone
    constant = ["--schedule", "constant", *SMALL]
    finished(4, text, "--steps", 3, "--out", tmp_path / "run", *constant)
    finished(2, text, "--steps", 6, f"--resume={tmp_path / 'run'}")
    finished(1, text, "--steps", 6, "--out", tmp_path / "one", *constant)
    one, run = digests(tmp_path / "one"), digests(tmp_path / "run")
    assert one["model.safetensors"] == run["model.safetensors"] != digests(folder)["model.safetensors"]


def test_rank_0_alone_chooses_the_folder(alone, tmp_path):
    needs_mpi()
    out, _ = finished(2, alone[0], "--steps", 1, *SMALL, cwd=tmp_path)
    assert os.listdir(tmp_path / "runs") == ["001"] and out.splitlines()[-1] == os.path.join("runs", "001")


def test_what_all_find_wrong_is_told_once(alone, tmp_path):
    needs_mpi()
    for code, arguments in [
        (2, ["--steps", "1e3"]), (1, [alone[0], *SMALL, "--out", alone[1]]),
        (1, [alone[0], "--n-embd", "8", "--n-head", "2", "--block-size", "12"]),  # one micro-batch for two
    ]:  # fmt: skip
        out, told = finished(2, *arguments, code=code, cwd=tmp_path)
        assert len(errors(told)) == 1 and out == "", told
        assert os.listdir(tmp_path) == []


def test_other_commands_tell_an_error_once(tmp_path):
    needs_mpi()
    program = [MPIEXEC, "-n", "2", sys.executable, "-m", "cmha", "generate", "nowhere"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=240)
    assert done.returncode == 1 and len(errors(done.stderr)) == 1, done.stderr


def newest_of_ended(folder):
    """The newest checkpoint, once no rank holds the folder's lock: the launcher may end a moment before the last."""
    from cmha.train.checkpoint import newest

    for _ in range(150):
        try:
            return newest(folder)
        except ValueError as error:
            if "one run at a time" not in str(error):
                raise
            time.sleep(0.1)
    raise AssertionError("a rank is still there after 15 seconds")


FAILING = """
import os, sys
from cmha.cli import main
from cmha.train import trainer
from cmha.train.parallel import launched_rank

rank, where, wrong = launched_rank(), sys.argv.pop(1), sys.argv.pop(1)
before = getattr(trainer.Trainer, where)

def broken(self, *arguments):
    if str(rank) in wrong and self.step == 3:
        if "kill" in wrong:
            os.kill(os.getpid(), 9)
        raise ValueError(f"[test] rank {rank} has a fault")
    return before(self, *arguments)

setattr(trainer.Trainer, where, broken)
sys.exit(main())
"""


@pytest.mark.parametrize("where, wrong, told", [
    ("_micro_batch", "1", 1), ("_write", "0", 1), ("_micro_batch", "kill 1", 0),
    *(pytest.param(*case, marks=pytest.mark.full) for case in [
        ("_train_step", "0", 1), ("_train_step", "0,1", 1), ("evaluate", "1", 1), ("evaluate", "kill 0", 0),
    ]),
])  # fmt: skip
def test_t7_a_rank_that_fails_or_is_killed_ends_all(alone, tmp_path, where, wrong, told):
    """With one message, and what was saved before stays whole. 15 seconds are promised (two are needed); a busy machine
    gets more."""
    needs_mpi()
    (tmp_path / "failing.py").write_text(FAILING)
    program = [MPIEXEC, "-n", "2", sys.executable, str(tmp_path / "failing.py"), where, wrong]
    arguments = ["train", alone[0], "--steps", 300, "--out", tmp_path / "run", *SMALL]
    arguments[arguments.index("--eval-interval") + 1] = "1"
    program += list(map(str, arguments))
    done = subprocess.run(program, capture_output=True, text=True, env=environment(), timeout=90)
    assert done.returncode not in (0, 2) and done.stdout.count("runs") == 0
    assert len([line for line in done.stderr.splitlines() if "cmha: error: [test] rank" in line]) == told, done.stderr
    checkpoint, damaged = newest_of_ended(tmp_path / "run")
    assert not damaged and checkpoint.step in (2, 3)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_p5_a_signal_to_one_rank_stops_all_after_the_same_step(alone, tmp_path, rank):
    needs_mpi()
    code = "import os, sys; from cmha.train.parallel import launched_rank as r; from cmha.cli import main; " \
           "open(sys.argv[1] + str(r()), 'w').write(str(os.getpid())); sys.argv.pop(1); sys.exit(main())"  # fmt: skip
    arguments = ["train", alone[0], "--steps", 10**6, "--out", tmp_path / "run", *SMALL]
    program = [MPIEXEC, "-n", "2", sys.executable, "-c", code, tmp_path / "pid", *arguments]
    running = subprocess.Popen(list(map(str, program)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment())  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoints").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(int((tmp_path / f"pid{rank}").read_text()), signal.SIGTERM)
        out, told = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 143, told
    assert told.count("stopped after step") == 1 and out.splitlines()[-1] == str(tmp_path / "run")
    step = newest_of_ended(tmp_path / "run")[0].step
    assert f"stopped after step {step} of" in told


def test_without_mpi4py_the_extra_is_named(monkeypatch):
    from cmha.train import parallel

    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert parallel.launched_rank() == 1
    with pytest.raises(ImportError, match=r"pip install 'cmha\[mpi\]'"):
        parallel.start()
    monkeypatch.setenv("PMI_SIZE", "1")
    assert parallel.launched_rank() is None and type(parallel.start()) is OneProcess
    for name in (*parallel.LAUNCHED, *parallel.RANKS):
        monkeypatch.delenv(name, raising=False)
    assert parallel.launched_rank() is None and type(parallel.start()) is OneProcess
