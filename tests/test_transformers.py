"""Beside the real `transformers` and PyTorch: folders in both directions, logits, greedy text, tokenizers.

Skipped where they are not installed (they are no extra of this package; `pip install torch transformers`).
"""

import re
from pathlib import Path

import numpy as np
import pytest

import cmha
from cmha import GPT, BPETokenizer, cli, no_grad
from cmha.text import load_tokenizer
from cmha.text.corpora import default_text

from . import reference
from .checking import EPS, array, same_bits
from .models import gpt2_vocabulary, ids, same_model, tiny, weights64

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
MIDDLE = {"vocab_size": 300, "block_size": 40, "n_layer": 4, "n_head": 4, "n_embd": 64}


def theirs(folder):
    """Opened there; every tensor had its place, and every place its tensor."""
    options = {"dtype": torch.float32, "output_loading_info": True}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def their_config(**changes):
    config = {"vocab_size": 300, "n_positions": 40, "n_layer": 4, "n_head": 4, "n_embd": 64}
    return transformers.GPT2Config(**{**config, "bos_token_id": None, "eos_token_id": None, **changes})


def their_model(seed=0, **changes):
    """A model of theirs in which no weight is 0 or 1, so that none can be forgotten."""
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(their_config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def check_logits(ours, other, tokens):
    """N8 of ours, and at most twice the error of PyTorch."""
    cfg = ours.cfg
    expected = reference.gpt(weights64(ours), tokens, cfg.n_layer, cfg.n_head)
    with no_grad():
        error = abs(array(ours(tokens)) - expected).max()
    with torch.no_grad():
        other_error = abs(other(torch.tensor(tokens)).logits.numpy() - expected).max()
    assert error <= 16 * EPS * np.sqrt(cfg.n_layer) * abs(expected).max()
    assert error <= 2 * other_error and other_error <= 1e-3 * abs(expected).max()


def check_greedy(ours, other, prompt, n):
    got = ours.generate(prompt, n, temperature=0)
    expected = other.generate(torch.tensor(prompt), max_new_tokens=n, do_sample=False, pad_token_id=0).numpy()
    assert got.tolist() == expected.tolist()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "trained"
    assert cli.main(["train", "--steps", "120", "--eval-interval", "120", "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("changes", [{}, MIDDLE, {"bias": False}, {"output_projection": False}], ids=str)
def test_a_folder_saved_here_opens_there(changes, tmp_path):
    ours = tiny(**changes)
    ours.save_pretrained(tmp_path)
    other = theirs(tmp_path)
    tokens = ids(3, ours.cfg.block_size, vocab_size=ours.cfg.vocab_size)
    check_logits(ours, other, tokens)
    check_greedy(ours, other, tokens[:1, :2], ours.cfg.block_size - 2)


def test_a_trained_run_opens_there(trained):
    ours, other = GPT.from_pretrained(trained), theirs(trained)
    tokens = np.array(load_tokenizer(trained).encode(default_text()[:96])).reshape(3, 32)
    check_logits(ours, other, tokens)
    check_greedy(ours, other, tokens[:1, :8], 24)


def test_training_goes_on_there_and_comes_back(trained, tmp_path):
    other = theirs(trained)
    tokens = torch.tensor(ids(2, 16))
    other.train()
    other(tokens, labels=tokens).loss.backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    other.eval().save_pretrained(tmp_path)
    check_logits(GPT.from_pretrained(tmp_path), other, tokens.numpy())


@pytest.mark.parametrize("shard", [None, "60KB"])
def test_a_folder_saved_there_opens_here(shard, tmp_path):
    other = their_model()
    other.save_pretrained(tmp_path, **({"max_shard_size": shard} if shard else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(shard)
    ours = GPT.from_pretrained(tmp_path)
    assert ours.num_parameters() == ours.cfg.num_parameters() == other.num_parameters()
    tokens = ids(3, 40, vocab_size=300)
    check_logits(ours, other, tokens)
    check_greedy(ours, other, tokens[:1, :5], 35)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_precisions_are_what_torch_makes_of_them(dtype, tmp_path):
    other = their_model().to(getattr(torch, dtype))
    other.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    state = other.to(torch.float32).state_dict()
    same_bits(ours.wte.weight, state["transformer.wte.weight"].numpy())
    same_bits(ours.h[3].mlp.c_fc.weight, state["transformer.h.3.mlp.c_fc.weight"].numpy())
    same_bits(ours.h[1].attn.c_k.bias, state["transformer.h.1.attn.c_attn.bias"].numpy()[64:128])


def test_the_bare_model_without_prefix_and_head(tmp_path):
    other = their_model()
    other.transformer.save_pretrained(tmp_path)
    check_logits(GPT.from_pretrained(tmp_path), other, ids(1, 40, vocab_size=300))


def test_what_another_configuration_computes_is_refused(tmp_path):
    refused = {
        "activation_function": "relu", "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True,
        "scale_attn_weights": False, "add_cross_attention": True, "layer_norm_epsilon": 1e-6, "n_inner": 100,
    }  # fmt: skip
    for key, value in refused.items():
        their_model(**{key: value}).save_pretrained(tmp_path / key)
        with pytest.raises(cmha.CheckpointError, match=key):
            GPT.from_pretrained(tmp_path / key)


TEXTS = ["Hello world", " two  spaces\n\n\tand a tab", "\u00e9\u4e2d \U0001f600!", "it's 2,024", "<|endoftext|>", ""]


def check_tokenizers(ours, other):
    for text in TEXTS:
        tokens = ours.encode(text, allow_special=True)
        assert other.encode(text, add_special_tokens=False) == tokens
        assert other.decode(tokens, clean_up_tokenization_spaces=False) == text == ours.decode(tokens)
    rng = np.random.default_rng(1)
    for _ in range(50):
        tokens = rng.integers(0, ours.vocab_size, 20).tolist()
        assert ours.decode(tokens) == other.decode(tokens, clean_up_tokenization_spaces=False)


def test_a_trained_tokenizer_opens_there(tmp_path):
    ours = BPETokenizer.train(default_text()[:50_000], 400)
    tiny(vocab_size=400).save_pretrained(tmp_path)
    ours.save(tmp_path)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(other) == ours.vocab_size == 400
    check_tokenizers(ours, other)
    other.save_pretrained(tmp_path / "back")
    check_tokenizers(load_tokenizer(tmp_path / "back"), other)


def test_gpt2s_tokenizer_opens_there(tmp_path):
    gpt2_vocabulary(tmp_path)
    tiny(vocab_size=50257, n_layer=1).save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    check_tokenizers(ours, transformers.AutoTokenizer.from_pretrained(tmp_path))
    (tmp_path / "new").mkdir()
    ours.save(tmp_path / "new")
    GPT.from_pretrained(tmp_path).save_pretrained(tmp_path / "new")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    check_tokenizers(load_tokenizer(tmp_path / "new"), other)
    assert other.eos_token_id == 50256 and len(other) == 50257


# --- the lines of docs/bring-your-gpt2.md that need PyTorch ---------------------------------------------------------

def document(word):
    """The block for PyTorch that holds a word."""
    text = (Path(__file__).parent.parent / "docs" / "bring-your-gpt2.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if word in code)
    return code


def test_a_pickled_folder_is_converted_as_the_document_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = their_model()
    other.config.save_pretrained("old")
    torch.save(other.state_dict(), "old/pytorch_model.bin")
    with pytest.raises(cmha.CheckpointError, match="pytorch_model.bin"):
        GPT.from_pretrained("old")
    exec(document('"old"'), {})
    check_logits(GPT.from_pretrained("old"), other, ids(1, 40, vocab_size=300))


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_checkpoint_is_converted_as_the_document_says(bias, tmp_path, monkeypatch):
    """Linear weights (out, in), a prefix of torch.compile, the head beside the table, a buffer; biases or none."""
    monkeypatch.chdir(tmp_path)
    ours = tiny(bias=bias)
    model = {}
    for name, a in cmha.gpt.layout.tensors(ours):
        if bias or not name.endswith("bias"):
            model[f"_orig_mod.transformer.{name}"] = torch.tensor(a.T.copy() if a.ndim == 2 and "h." in name else a)
    model["_orig_mod.lm_head.weight"] = model["_orig_mod.transformer.wte.weight"]
    model["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    args = {"block_size": 8, "vocab_size": 11, "n_layer": 2, "n_head": 2, "n_embd": 12, "bias": bias, "dropout": 0.0}
    for folder in ("out", "nano"):
        Path(folder).mkdir()
    torch.save({"model": model, "model_args": args, "iter_num": 5, "best_val_loss": torch.tensor(1.0)}, "out/ckpt.pt")
    exec(document("ckpt.pt"), {})
    same_model(GPT.from_pretrained("nano"), ours)
