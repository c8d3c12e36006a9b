"""What training and going on refuse, in words that say what to do; files beside a checkpoint are mended."""

import os
import re

import numpy as np
import pytest

import cmha
from cmha import GPT, CharTokenizer, GPTConfig
from cmha.cli import main
from cmha.errors import CheckpointError
from cmha.text.corpora import Corpus
from cmha.train import Trainer, TrainSettings
from cmha.train.accumulate import share
from cmha.train.checkpoint import checkpoints, newest

IDS = np.random.default_rng(6).integers(0, 11, 700)
SIZES = ["--n-layer", "1", "--n-embd", "8", "--n-head", "2", "--block-size", "12"]


def model(**sizes):
    cmha.manual_seed(8)
    return GPT(GPTConfig(**{"vocab_size": 11, "block_size": 7, "n_layer": 1, "n_head": 2, "n_embd": 6} | sizes))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run of the command in `run`, with checkpoints at 20, 30 and 40 at most."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("the cat sat on the mat, and the dog did not.\n" * 40)
    assert main(["train", "a.txt", *SIZES, "--steps", "40", "--eval-interval", "10", "--out", "run"]) == 0
    return tmp_path / "run"


def refused(capsys, *arguments, code=1):
    capsys.readouterr()
    assert main(list(map(str, arguments))) == code
    return capsys.readouterr().err.splitlines()[-1]


def truncate(path):
    os.truncate(path, os.path.getsize(path) // 2)


def test_resuming_a_finished_run_mends_the_files_beside_its_checkpoint(run):
    names = ["model.safetensors", "config.json", "tokenizer_cmha.json"]
    whole = {name: (run / name).read_bytes() for name in names}
    for name in names:
        (run / name).unlink()
    assert main(["train", "a.txt", "--out", "run", "--resume"]) == 0
    assert {name: (run / name).read_bytes() for name in names} == whole
    (run / "model.safetensors").write_bytes(b"damaged")
    assert main(["train", "a.txt", "--resume=run"]) == 0
    assert (run / "model.safetensors").read_bytes() == whole["model.safetensors"]


def test_a_run_that_falls_back_has_the_model_of_the_step_it_is_at(run):
    last = (run / "model.safetensors").read_bytes()
    truncate(run / "checkpoints" / "step-40.safetensors")
    assert main(["train", "a.txt", "--out", "run", "--resume", "--steps", "30"]) == 0
    assert checkpoints(run)[-1][0] == 30 and newest(run)[1] == []  # the damaged one is gone
    assert (run / "model.safetensors").read_bytes() != last
    checkpoint = newest(run)[0]
    expected = model(vocab_size=checkpoint.config["vocab_size"], block_size=12, n_embd=8)
    trainer = Trainer(expected, Corpus.from_ids(IDS[:600], IDS[600:]), progress=False)
    checkpoint.restore(expected, trainer.optimizer)
    for (name, a), (_, b) in zip(expected.named_parameters(), GPT.from_pretrained(run).named_parameters(), strict=True):
        assert np.array_equal(a.detach().numpy(), b.detach().numpy()), name


def test_the_newest_checkpoint_damaged_names_the_one_to_go_on_from(run, capsys):
    truncate(run / "checkpoints" / "step-40.safetensors")
    line = refused(capsys, "train", "a.txt", "--resume=run")
    assert "step-40.safetensors" in line and line.endswith("--out run --resume goes on from step-30")
    for _, path in checkpoints(run)[:-1]:
        truncate(path)
    for how in (["--resume=run"], ["--out", "run", "--resume"]):
        assert re.search(r"step-40\.safetensors'; damaged too: step-30", refused(capsys, "train", "a.txt", *how))


def test_what_is_given_as_text_or_checkpoint_and_is_neither(run, capsys):
    for words in (["a.txt", "--resume", "run"], ["run"]):
        assert refused(capsys, "train", *words, code=2).endswith("--resume=run")
    assert refused(capsys, "train", "run/checkpoints", code=2).endswith("--resume=run")
    path = "run/checkpoints/step-40.safetensors"
    assert refused(capsys, "train", "a.txt", "--resume", path, code=2).endswith(f"--resume={path}")
    assert "a run's folder or a checkpoint" in refused(capsys, "train", "--resume=a.txt", code=2)
    line = refused(capsys, "train", "a.txt", "--resume=run/model.safetensors")
    assert "file must be a checkpoint of format" in line
    line = refused(capsys, "train", "a.txt", "--resume=run", "--steps", 3)
    assert "steps must be at least those already done; got steps=3 after 40" in line


def test_init_takes_a_padded_vocabulary(run, capsys):
    tokenizer = CharTokenizer.load(run)
    GPT(GPTConfig(tokenizer.vocab_size + 5, 12, 1, 2, 8)).save_pretrained("padded")
    tokenizer.save("padded")
    assert main(["train", "a.txt", "--init", "padded", "--steps", "1", "--out", "new"]) == 0
    assert GPT.from_pretrained("new").cfg.vocab_size == tokenizer.vocab_size + 5


def test_a_folder_of_texts_and_token_files_is_told(run, capsys):
    os.mkdir("both")
    assert main(["tokenize", "a.txt", "--out", "both/ids.safetensors"]) == 0
    (run.parent / "both" / "more.txt").write_text("text")
    assert main(["train", "both", *SIZES, "--steps", "1", "--out", "new"]) == 0
    assert "of the folder 'both' only its token files: ids.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("ids, kind, rule", [
    ([-1] * 100, ValueError, r"from 0 to 2\*\*32 - 1; got -1"), ([2**32] * 100, ValueError, "got 4294967296"),
    (np.zeros(100), TypeError, "integers; got dtype float64"), (["a"] * 100, TypeError, "integers"),
    ([[1, 2]], ValueError, "one row"), ([[1], [1, 2]], ValueError, "one row"), (5, ValueError, "one row"),
    (np.ones(9, bool), TypeError, "dtype bool"),
])  # fmt: skip
def test_ids_that_are_none_are_refused_where_they_are_given(ids, kind, rule):
    for name, parts in {"training": (ids, IDS), "validation": (IDS, ids)}.items():
        with pytest.raises(kind, match=rf"^\[train\] {name} ids must be .*{rule}"):
            Corpus.from_ids(*parts)


def test_lists_of_ids_train_as_arrays_do():
    found = []
    for corpus in (Corpus.from_ids(IDS[:600], IDS[600:]), Corpus.from_ids(IDS[:600].tolist(), IDS[600:].tolist())):
        trainer = Trainer(model(), corpus, TrainSettings(steps=3, eval_interval=3), progress=False)
        trainer.run()
        found.append((corpus.sha256, trainer.rows[-1]["val_loss"]))
    assert found[0] == found[1]
    with pytest.raises(ValueError, match=r"^\[sample\] a sample needs the tokenizer"):
        trainer.sample()


def test_betas_are_checked_and_numbers_of_numpy_are_kept(tmp_path):
    for bad, kind in ((5, TypeError), ((1, 2, 3), ValueError), ((0.9, 1.0), ValueError), ((0.9, "x"), TypeError)):
        with pytest.raises(kind, match=r"^\[train\] betas"):
            TrainSettings(betas=bad)
    settings = TrainSettings(steps=np.int64(2), lr=np.float32(0.5), betas=(np.float32(0.5), 0))
    Trainer(model(), Corpus.from_ids(IDS[:600], IDS[600:]), settings, tmp_path / "run", progress=False).run()
    assert newest(tmp_path / "run")[0].settings_with({}) == settings


def test_t3_a_loss_that_is_not_finite_while_all_weights_are_names_the_first_output():
    corpus = Corpus.from_ids(IDS[:600], IDS[600:])
    trainer = Trainer(model(n_layer=2), corpus, TrainSettings(lr=1e30, warmup_steps=0), progress=False)
    rule = r"loss must be finite; got nan at step 2, first in the output of (wte|h\.0\.\w+|h\.0\.\w+\.\w+)$"
    with pytest.raises(ValueError, match=rule):
        trainer.run()
    assert all(np.isfinite(p.detach().numpy()).all() for p in trainer.model.parameters())


def test_too_few_micro_batches_name_the_option():
    with pytest.raises(ValueError, match="2 processes and 1 micro-batches.*--micro-batch-size"):
        share(1, 0, 2)


def test_checkpoints_that_are_all_damaged_are_all_named(run):
    paths = [path for _, path in checkpoints(run)]
    for path in paths:
        truncate(path)
    with pytest.raises(CheckpointError) as error:
        newest(run)
    assert all(os.path.basename(path) in str(error.value) for path in paths)
