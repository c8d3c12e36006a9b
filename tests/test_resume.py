"""Going on: the same bits as without a stop, and refusals that say what is different."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

import cmha
from cmha import GPT, CharTokenizer, GPTConfig
from cmha.cli import main
from cmha.errors import CheckpointError
from cmha.text.corpora import Corpus, open_data
from cmha.train import Trainer, TrainSettings
from cmha.train.checkpoint import Checkpoint, checkpoints, newest

IDS = np.random.default_rng(6).integers(0, 11, 700)
CORPUS = Corpus.from_ids(IDS[:600], IDS[600:])
TEXT = "the cat sat on the mat, and the dog did not.\n" * 40
SIZES = ["--n-layer", "1", "--n-embd", "8", "--n-head", "2", "--block-size", "12"]


def trainer(folder, **settings):
    cmha.manual_seed(8)
    model = GPT(GPTConfig(vocab_size=11, block_size=7, n_layer=2, n_head=2, n_embd=6, dropout=0.2))
    defaults = {"steps": 50, "batch_size": 5, "micro_batch_size": 2, "eval_interval": 10, "lr": 0.02, "seed": 3}
    return Trainer(model, CORPUS, TrainSettings(**defaults | settings), folder, progress=False)


def stop_after(run, step, number=signal.SIGTERM):
    """A run that a signal ends after so many steps."""
    train_step = run._train_step

    def signalled():
        train_step()
        if run.step == step:
            signal.raise_signal(number)

    run._train_step = signalled
    return run


def files(folder):
    """{path: bytes} of a run, its log without what a clock says."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = file.read()
    rows = [json.loads(line) for line in found["log.jsonl"].splitlines()]
    found["log.jsonl"] = [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert trainer(folder).run() is None
    return files(folder)


def test_d6_two_runs_are_the_same_bytes(whole, tmp_path):
    trainer(tmp_path).run()
    assert files(tmp_path) == whole
    assert {"log.jsonl", "model.safetensors", "config.json", "checkpoints/step-50.safetensors"} <= set(whole)


@pytest.mark.parametrize("step", [1, 7, 10, 25, 49, 50])
def test_d6_t2_stopped_and_resumed_is_the_same_bytes(step, whole, tmp_path):
    """Between evaluations, at one, and after the last step: weights, moments, log, best, and which files there are."""
    assert stop_after(trainer(tmp_path), step).run() == signal.SIGTERM
    assert checkpoints(tmp_path)[-1][0] == step
    run = Trainer.resume(tmp_path, CORPUS, progress=False)
    assert run.step == step and run.run() is None
    assert files(tmp_path) == whole
    again = Trainer.resume(tmp_path, CORPUS, progress=False)  # nothing is left to do
    assert again.run() is None and files(tmp_path) == whole and again.rows[-1]["step"] == 50


def test_t2_stopped_at_every_step_is_the_same_bytes(whole, tmp_path):
    stop_after(trainer(tmp_path), 1).run()
    for step in range(2, 51):
        stop_after(Trainer.resume(tmp_path, CORPUS, progress=False), step).run()
    assert Trainer.resume(tmp_path, CORPUS, progress=False).run() is None
    assert files(tmp_path) == whole


def test_a_stopped_trainer_goes_on_in_the_same_process(whole, tmp_path):
    """As in a notebook, where the stop button is SIGINT."""
    run = stop_after(trainer(tmp_path), 17, signal.SIGINT)
    assert run.run() == signal.SIGINT and run.run() is None
    assert files(tmp_path) == whole


def test_checkpointed_activations_threads_and_intervals_may_change(whole, tmp_path):
    stop_after(trainer(tmp_path, checkpoint_activations=True, eval_interval=5), 17).run()
    cmha.set_num_threads(3)
    run = Trainer.resume(tmp_path, CORPUS, eval_interval=25, progress=False)
    assert run.settings.checkpoint_activations and run.run() is None
    name = "model.safetensors"
    assert (tmp_path / name).read_bytes() == whole[name]
    assert [row["step"] for row in files(tmp_path)["log.jsonl"]] == [5, 10, 15, 25, 50]


def test_more_steps_continue_a_schedule_that_has_no_end(tmp_path):
    """constant: stopping at 20 and going on to 40 is a run of 40. cosine: from here on that of a run of 40."""
    for schedule in ("constant", "cosine"):
        one, two = tmp_path / f"{schedule}-1", tmp_path / f"{schedule}-2"
        trainer(one, steps=40, schedule=schedule, warmup_steps=5).run()
        trainer(two, steps=20, schedule=schedule, warmup_steps=5).run()
        run = Trainer.resume(two, CORPUS, steps=40, progress=False)
        run.run()
        same = (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
        assert same == (schedule == "constant")
        assert run.rows[-1]["lr"] == files(one)["log.jsonl"][-1]["lr"]
    with pytest.raises(ValueError, match="steps must be at least those already done; got steps=39 after 40"):
        Trainer.resume(two, CORPUS, steps=39)


def test_the_two_newest_evaluations_and_the_best_are_kept(tmp_path):
    run = trainer(tmp_path, steps=60)
    values = iter([3.0, 1.0, 2.0, 2.5, 1.0, 4.0])
    run.evaluate = lambda stop: next(values)
    run.run()
    assert run.best == [1.0, 20]
    assert [step for step, _ in checkpoints(tmp_path)] == [20, 50, 60]
    resumed = Trainer.resume(tmp_path, CORPUS, steps=80, progress=False)
    assert resumed.best == [1.0, 20]
    values = iter([0.5, 0.75])
    resumed.evaluate = lambda stop: next(values)
    resumed.run()
    assert [step for step, _ in checkpoints(tmp_path)] == [70, 80] and resumed.best == [0.5, 70]


# ------------------------------------------------------------------------------------------ damage
def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = b""
    else:
        at = {"a weight": len(data) - 1000, "the step": bytes(data).index(b'"step"') + 9}[how]
        data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "empty", "a weight", "the step"])
def test_t5_a_damaged_newest_checkpoint_falls_back_to_the_one_before(how, whole, tmp_path):
    stop_after(trainer(tmp_path), 34).run()
    assert [step for step, _ in checkpoints(tmp_path)][-3:] == [20, 30, 34]
    damage(tmp_path / "checkpoints" / "step-34.safetensors", how)
    with pytest.warns(UserWarning, match=r"step-34\.safetensors.*going on from .*step-30\.safetensors") as warned:
        run = Trainer.resume(tmp_path, CORPUS, progress=False)
    assert len(warned) == 1 and run.step == 30
    assert run.run() is None and files(tmp_path) == whole
    damage(tmp_path / "checkpoints" / "step-50.safetensors", how)
    with pytest.raises(CheckpointError, match=r"step-50\.safetensors"):  # asked for by name: nothing else will do
        Trainer.resume(tmp_path / "checkpoints" / "step-50.safetensors", CORPUS)


def test_t5_nothing_is_begun_again_over_checkpoints_that_are_all_damaged(tmp_path):
    trainer(tmp_path, steps=20).run()
    for _, path in checkpoints(tmp_path):
        damage(tmp_path / path, "a weight")
    with pytest.raises(CheckpointError, match=r"step-20\.safetensors"):
        Trainer.resume(tmp_path, CORPUS)
    with pytest.raises(CheckpointError, match=r"step-20\.safetensors"):
        newest(tmp_path)


def test_an_older_checkpoint_named_replaces_the_newer_ones(whole, tmp_path):
    trainer(tmp_path).run()
    path = next(path for step, path in checkpoints(tmp_path) if step == 40)
    assert Trainer.resume(path, CORPUS, progress=False).run() is None
    assert files(tmp_path) == whole


def test_a_log_that_a_crash_cut_short_or_wrote_ahead_has_no_gap_and_nothing_twice(whole, tmp_path):
    stop_after(trainer(tmp_path), 31).run()
    lines = (tmp_path / "log.jsonl").read_text()
    for n, odd in enumerate((lines + '{"step": 30, "loss"', lines + '{"step": 30}\n', lines + '{"step": 99}\n\x00\n')):
        (tmp_path / "log.jsonl").write_text(odd)
        run = Trainer.resume(tmp_path, CORPUS, progress=False)
        stop_after(run, 32 + n).run()
        assert [row["step"] for row in files(tmp_path)["log.jsonl"]] == [10, 20, 30]
    Trainer.resume(tmp_path, CORPUS, progress=False).run()
    assert files(tmp_path) == whole


def test_leftovers_of_a_killed_run_go(tmp_path):
    stop_after(trainer(tmp_path), 12).run()
    names = [".config.json.tmp-123", "checkpoints/.step-20.safetensors.tmp-99"]
    for name in [*names, ".mine.tmp", "notes"]:
        (tmp_path / name).write_text("half")
    Trainer.resume(tmp_path, CORPUS, progress=False).run()
    assert {".mine.tmp", "notes"} <= set(os.listdir(tmp_path))
    assert not [name for name in names if (tmp_path / name).exists()]


# ------------------------------------------------------------------------------------------ what does not fit
def test_t4_other_data_is_refused(tmp_path):
    stop_after(trainer(tmp_path), 3).run()
    other = IDS.copy()
    other[650] ^= 1
    with pytest.raises(ValueError, match=r"^\[resume\] .* got data \w{12}\.\.\. \(the checkpoint: \w{12}\.\.\.\)"):
        Trainer.resume(tmp_path, Corpus.from_ids(other[:600], other[600:]))
    with pytest.raises(ValueError, match="got tokenizer"):
        Trainer.resume(tmp_path, replace(CORPUS, tokenizer=CharTokenizer("abcdefghijk")))
    with pytest.raises(ValueError, match="must hold a checkpoint"):
        Trainer.resume(os.path.join(tmp_path, "checkpoints"), CORPUS)
    with pytest.raises(FileNotFoundError):
        Trainer.resume(os.path.join(tmp_path, "none"), CORPUS)
    elsewhere = tmp_path / "copy.safetensors"
    elsewhere.write_bytes((tmp_path / "checkpoints" / "step-3.safetensors").read_bytes())
    with pytest.raises(ValueError, match="must lie in RUN/checkpoints"):
        Trainer.resume(elsewhere, CORPUS)


def refused(capsys, *arguments, code=1):
    capsys.readouterr()
    assert main(list(map(str, arguments))) == code
    *progress, line = capsys.readouterr().err.splitlines()
    assert line.startswith("cmha: error: ")
    return line


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT.replace("dog", "god"))
    (tmp_path / "c.txt").write_text(TEXT.replace("dog", "pig"))


def test_t4_the_command_lists_every_difference(texts, capsys):
    train = ["train", "a.txt", "--steps", 6, "--eval-interval", 3]
    assert main(list(map(str, [*train, *SIZES]))) == 0
    line = refused(capsys, "train", "b.txt", "--resume", "--lr", "0.1", "--n-head", 4, "--seed", 5, "--dropout", "0.5",
                   "--tokenizer", "byte", "--grad-accumulation", 2, "--steps", 9)  # fmt: skip
    for part in ("lr 0.1 (the checkpoint: 0.003)", "n_head 4 (the checkpoint: 2)", "seed 5 (the checkpoint: 0)",
                 "dropout 0.5 (the checkpoint: 0.0)", "tokenizer_type 'byte' (the checkpoint: 'char')",
                 "micro_batch_size 4 (the checkpoint: 8)", "data "):  # fmt: skip
        assert part in line, part
    assert "steps" not in line
    line = refused(capsys, "train", "c.txt", "--resume")
    assert "'p' at position" in line and "TEXT it began with" in line
    assert "the checkpoint: 0.003" in refused(capsys, "train", "c.txt", "--resume", "--lr", 1)
    assert "n_embd 64 (the checkpoint: 8)" in refused(capsys, "train", "a.txt", "--resume", "--preset", "tiny")
    assert main(["train", "a.txt", "--resume=runs/001", *SIZES, "--steps", "8"]) == 0  # what is given agrees
    assert [step for step, _ in checkpoints("runs/001")] == [6, 8]


def test_the_same_command_begins_and_goes_on(texts, capsys):
    """--resume without a path: in --out, or in the newest of runs/."""
    train = ["train", "a.txt", *SIZES, "--eval-interval", "2", "--resume"]
    for out, folder in ((["--out", "mine"], "mine"), ([], "runs/001")):
        for steps in ("4", "4", "6"):
            assert main([*train, *out, "--steps", steps]) == 0
            assert capsys.readouterr().out.splitlines()[-1] == folder
        assert [row["step"] for row in files(folder)["log.jsonl"]] == [2, 4, 6]
    assert os.listdir("runs") == ["001"]
    os.makedirs("model")
    GPT(GPTConfig.tiny(vocab_size=9)).save_pretrained("model")
    before = os.stat("model/model.safetensors")
    assert "must not hold a run or a model" in refused(capsys, *train, "--out", "model")
    assert os.stat("model/model.safetensors") == before and len(os.listdir("model")) == 2
    assert "must hold a checkpoint" in refused(capsys, "train", "a.txt", "--resume=model")
    assert "No such file" in refused(capsys, "train", "a.txt", "--resume=none")


def test_t5_the_command_says_what_it_passes_over(texts, tmp_path, capsys):
    train = ["train", "a.txt", *SIZES, "--eval-interval", "2", "--steps", "4", "--out", "run"]
    assert main(train) == 0
    expected = files("run")
    damage(tmp_path / "run/checkpoints/step-4.safetensors", "a weight")
    line = refused(capsys, "train", "a.txt", "--resume=run")
    assert "step-4.safetensors" in line and "SHA-256" in line
    assert main([*train, "--resume"]) == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert "step-4.safetensors" in warning and "going on from 'run/checkpoints/step-2.safetensors'" in warning
    assert files("run") == expected


def test_two_trainers_on_one_folder(whole, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    folder = tmp_path / "run"
    stop_after(trainer(folder), 12).run()
    first, second = (Trainer.resume(folder, CORPUS, progress=False) for _ in range(2))
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)  # as a run of another process has it
    with pytest.raises(ValueError, match="one run at a time may use a folder; got another one in"):
        first.run()
    os.close(held)
    assert first.run() is None and files(folder) == whole
    with pytest.raises(ValueError, match="one run at a time may use a folder; got other checkpoints"):
        second.run()  # it read what is no longer there
    with pytest.raises(ValueError, match="must not hold a run"):
        trainer(folder).run()
    assert files(folder) == whole


def test_fine_tuning_starts_from_weights_and_tokenizer(texts, tmp_path, capsys):
    train = ["train", "a.txt", *SIZES, "--steps", "8", "--eval-interval", "8"]
    assert main([*train, "--out", "first"]) == 0
    assert main(["train", "b.txt", "--init", "first", "--steps", "1", "--lr", "1e-9", "--out", "second",
                 "--block-size", "6", "--dropout", "0.25"]) == 0  # fmt: skip
    one, two = GPT.from_pretrained("first"), GPT.from_pretrained("second")
    assert two.cfg.block_size == 6 and two.cfg.dropout == 0.25 and two.cfg.n_embd == 8
    one.crop_block_size(6)
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        np.testing.assert_allclose(a.detach().numpy(), b.detach().numpy(), atol=1e-8, err_msg=name)
    name = "tokenizer_cmha.json"
    assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert "'p' at position" in refused(capsys, "train", "c.txt", "--init", "first")
    assert "can only shrink" in refused(capsys, "train", "a.txt", "--init", "first", "--block-size", 13)
    CharTokenizer("".join(map(chr, range(32, 127))) + "\n").save("first")
    assert "must hold every id of the tokenizer" in refused(capsys, "train", "a.txt", "--init", "first")
    assert not os.path.exists("runs")


def test_a_trainer_is_the_command(texts, tmp_path):
    """The ten lines of a notebook write the folder that the command writes."""
    assert main(["train", "a.txt", "--steps", "20", "--eval-interval", "10", "--out", "command"]) == 0
    corpus = open_data(["a.txt"], "char", 32)
    cmha.manual_seed(0)
    model = GPT(GPTConfig.tiny(vocab_size=corpus.tokenizer.vocab_size))
    Trainer(model, corpus, TrainSettings(steps=20, eval_interval=10), "notebook", progress=False).run()
    assert files("command") == files("notebook")


class Logger:
    def __init__(self):
        self.seen = []

    def log(self, values, step):
        self.seen.append((step, values))


def test_samples_and_losses_go_to_a_logger(texts, tmp_path, capsys):
    corpus, logger = open_data(["a.txt"], "char", 12), Logger()
    model = GPT(GPTConfig(corpus.tokenizer.vocab_size, 12, 1, 2, 8, dropout=0.1))
    settings = TrainSettings(steps=6, eval_interval=3, sample_interval=2)
    run = Trainer(model, corpus, settings, logger=logger, progress=False)
    run.run()
    assert [(step, sorted(values)[0]) for step, values in logger.seen] == [
        (2, "sample"), (3, "grad_norm"), (4, "sample"), (6, "grad_norm"), (6, "sample"),
    ]  # fmt: skip
    assert set(logger.seen[1][1]) == {"loss", "val_loss", "lr", "grad_norm", "tokens_per_second"}
    assert len(logger.seen[0][1]["sample"]) > 300 and logger.seen[-1][1]["sample"] == run.sample()
    sizes = ["--steps", "6", "--eval-interval", "3", "--out", "quiet"]
    assert main(["train", "a.txt", *SIZES, *sizes]) == 0
    assert main(["train", "a.txt", *SIZES, *sizes[:-1], "talking", "--sample-interval", "2"]) == 0
    assert "after step 4:" in capsys.readouterr().err
    name = "model.safetensors"  # a sample changes nothing
    assert (tmp_path / "quiet" / name).read_bytes() == (tmp_path / "talking" / name).read_bytes()


def test_a_checkpoint_of_another_format_or_model_changes_nothing(tmp_path):
    run = trainer(tmp_path, steps=1)
    run.run()
    checkpoint = Checkpoint.read(checkpoints(tmp_path)[0][1])
    cmha.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=11, block_size=7, n_layer=2, n_head=2, n_embd=8))
    other = Trainer(model, CORPUS, TrainSettings(), progress=False)
    before = [np.array(p.detach()) for p in model.parameters()]
    with pytest.raises(CheckpointError, match=r"tensors must be those of this model.*step-1\.safetensors"):
        checkpoint.restore(model, other.optimizer)
    assert all(np.array_equal(a, p.detach().numpy()) for a, p in zip(before, model.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="must be a checkpoint of format"):
        Checkpoint.read(tmp_path / "model.safetensors")
    assert {"simd", "cmha", "numpy"} <= set(checkpoint.build) and "threads" not in checkpoint.build
