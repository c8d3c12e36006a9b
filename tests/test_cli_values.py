"""The command line: values that options take, and what a terminal shows meanwhile."""

import os

import numpy as np
import pytest

import cmha
from cmha.cli import main
from cmha.cli.options import Parser, number
from cmha.text import CharTokenizer

from .models import tiny

TEXT = "the cat sat on the mat\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("values"), CharTokenizer(TEXT)
    tiny(vocab_size=tokenizer.vocab_size, block_size=20).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def said(capsys, folder, *more):
    assert main(["generate", str(folder), "--max-new-tokens", "25", *more]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("given", [["--seed", "4,9"], ["--seed", "4", "--seed", "9"], ["--seed=4", "--seed=+9"]])
def test_a_seed_for_each_prompt_gives_the_text_of_the_prompt_alone(folder, capsys, given):
    alone = [said(capsys, folder, "--prompt", p, "--seed", s) for p, s in (("the", "4"), ("a cat", "9"))]
    assert alone[0] + "-" * 40 + "\n" + alone[1] == said(capsys, folder, "--prompt", "the", "--prompt", "a cat", *given)
    assert alone[1] != said(capsys, folder, "--prompt", "a cat", "--seed", "4")


def test_one_seed_for_several_prompts_gives_each_row_draws_of_its_own(folder, capsys):
    first, second = said(capsys, folder, "--prompt", "cat", "--prompt", "cat", "--seed", "4").split("-" * 40 + "\n")
    assert first == said(capsys, folder, "--prompt", "cat", "--seed", "4") and first != second


def test_seeds_that_do_not_fit_the_prompts_are_counted(folder, capsys):
    assert main(["generate", str(folder), "--prompt", "a", "--prompt-file", "none", "--seed", "1,2,3"]) == 2
    assert capsys.readouterr().err == "cmha: error: --seed must be one number, or one for each prompt; got 3 for 2\n"


@pytest.mark.parametrize("text", ["-1e3", "-1e-3", "-.5", "-5.", "-2E+1", "-3"])
def test_a_negative_number_is_a_value_and_no_option(text):
    parser = Parser()
    parser.add_argument("--x", type=number(lambda x: True, "a finite number"))
    assert parser.parse_intermixed_args(["--x", text]).x == float(text)


def test_a_length_penalty_below_zero_reaches_the_search(folder, capsys):
    beams = ["--prompt", "the", "--num-beams", "3"]
    assert said(capsys, folder, *beams, "--length-penalty", "-1e0").startswith("the")
    assert main(["generate", str(folder), *beams, "--length-penalty", "-1e3"]) == 2
    assert "must be a number from -10 to 10; got '-1e3'" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--num-beams", "2"], ["--seed", "1"]])
def test_texts_that_come_together_show_how_far_they_are(folder, capsys, monkeypatch, more):
    """On a terminal alone: tqdm's disable=None."""
    bars = []

    class Bar:
        def __init__(self, **options):
            self.options, self.at = options, 0
            bars.append(self)

        def update(self, count):
            self.at += count

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("cmha.text.token_files.tqdm", Bar)
    said(capsys, folder, "--prompt", "the", "--prompt", "a", *more)
    (bar,) = bars
    assert bar.at == bar.options["total"] == 2 * 25 and bar.options["disable"] is None


def test_progress_counts_the_steps_of_a_search_and_the_ids_of_rows_until_they_end(folder):
    gpt, counts = cmha.GPT.from_pretrained(folder), []
    rows = gpt.generate([[1, 2], [3]], 6, num_beams=2, progress=counts.append)
    assert counts == [1] * 12 and [len(row) for row in rows] == [8, 7]
    counts.clear()
    free = gpt.generate(np.array([[1, 2], [3, 4]]), 6, temperature=0)
    rows = gpt.generate([[1, 2], [3, 4, 5]], 6, temperature=0, stop=int(free[0, 3]), progress=counts.append)
    assert counts == [1] * sum(len(row) - n for row, n in zip(rows, (2, 3), strict=True)) and len(rows[0]) <= 4


@pytest.mark.skipif(os.name == "nt", reason="names hold no control characters there")
def test_heads_spells_out_a_folder_with_control_characters(folder, tmp_path, capsys):
    link = tmp_path / "a\x1b[31m"
    link.symlink_to(folder, target_is_directory=True)
    assert main(["heads", str(link), "the cat"]) == 0
    out = capsys.readouterr().out
    assert "a\\x1b[31m: 'the cat'" in out.split("\n")[0] and "\x1b" not in out


def test_standard_input_is_no_text_to_train_on(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-", "--steps", "1"]) == 2
    assert "TEXT must be files, which can be read again; got '-', standard input" in capsys.readouterr().err
