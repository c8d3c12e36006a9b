"""Optimiser, schedule, checkpoints and the loop."""

import json
import math
import os
import signal

import numpy as np
import pytest

import cmha
from cmha import GPT, AdamW, GPTConfig, clip_grad_norm_, cosine_schedule
from cmha.text.corpora import Corpus
from cmha.train import Trainer, TrainSettings, constant_schedule, parameter_groups, wsd_schedule
from cmha.train.checkpoint import Checkpoint, checkpoints
from cmha.train.memory import bytes_available, bytes_needed
from cmha.train.progress import fitted

ENDINGS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def leaf(values):
    return cmha.tensor(np.array(values, np.float32), requires_grad=True)


def give(parameter, grad):
    parameter.grad = cmha.tensor(np.broadcast_to(np.float32(grad), parameter.shape).copy())


def value(parameter):
    return parameter.detach().numpy()


def tiny(**changes):
    cmha.manual_seed(8)
    return GPT(GPTConfig(**{"vocab_size": 11, "block_size": 7, "n_layer": 1, "n_head": 2, "n_embd": 6} | changes))


def reference(p, grads, lr, betas, eps, decay):
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        p = p * (1 - lr * decay)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        p = p - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return p


def test_b38_adamw_two_steps():
    p = leaf([1.0])
    opt = AdamW([p], 0.1, weight_decay=0.1)
    give(p, 0.5)
    opt.step()
    assert abs(value(p)[0] - 0.890000002) < 2e-7
    give(p, -1.0)
    opt.step()
    assert abs(value(p)[0] - 0.917710354) < 2e-7
    q = leaf([1.0])
    give(q, 1e-8)
    AdamW([q], 0.1, weight_decay=0).step()
    assert abs(1 - value(q)[0] - 0.05) < 2e-7


def test_b44_only_matrices_decay_and_each_once():
    gpt = tiny()
    before = {name: value(p).copy() for name, p in gpt.named_parameters()}
    groups = parameter_groups(gpt, 0.1)
    chosen = [id(p) for group in groups for p in group["params"]]
    assert sorted(chosen) == sorted(map(id, gpt.parameters())) and len(set(chosen)) == len(chosen)
    opt = AdamW(groups, 0.1)
    for p in gpt.parameters():
        give(p, 0.0)
    opt.step()
    for name, p in gpt.named_parameters():
        if p.ndim == 1:
            assert value(p).tobytes() == before[name].tobytes(), name
        else:
            np.testing.assert_allclose(value(p), before[name] * 0.99, rtol=3e-7)


def test_adamw_against_float64_and_a_late_parameter():
    rng = np.random.default_rng(1)
    start, grads = rng.standard_normal((3, 5)), rng.standard_normal((4, 3, 5))
    a, b = leaf(start), leaf(start[0])
    opt = AdamW([{"params": [a], "weight_decay": 0.3}, {"params": [b]}], 0.02, betas=(0.8, 0.9), weight_decay=0.0)
    for t, grad in enumerate(grads):
        opt.zero_grad()
        give(a, grad)
        if t >= 2:  # as if it were new
            give(b, grad[0])
        opt.step()
    assert a.grad is not None
    np.testing.assert_allclose(value(a), reference(np.float32(start), grads, 0.02, (0.8, 0.9), 1e-8, 0.3), rtol=3e-6)
    expected = reference(np.float32(start[0]), grads[2:, 0], 0.02, (0.8, 0.9), 1e-8, 0.0)
    np.testing.assert_allclose(value(b), expected, rtol=3e-6)


def test_adamw_continues_from_its_state():
    rng = np.random.default_rng(2)
    start, grads = rng.standard_normal((2, 3)), rng.standard_normal((6, 2, 3))
    whole, first = leaf(start), leaf(start)
    opt, one = AdamW([whole], 0.1), AdamW([first], 0.1)
    for t, grad in enumerate(grads):
        if t == 3:
            state = one.state_dict()
            second = leaf(value(first).copy())
            one = AdamW([second], 0.7)
            one.load_state_dict(state)
            assert one.lr == 0.1
        for p, o in ((whole, opt), (first if t < 3 else second, one)):
            give(p, grad)
            o.step()
    assert value(whole).tobytes() == value(second).tobytes()
    before = one.state_dict()
    for bad in (
        {}, before | {"m": []}, before | {"v": [np.zeros(3)]}, before | {"steps": [-1]}, before | {"lr": -1.0},
        before | {"steps": []},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            one.load_state_dict(bad)
    after = one.state_dict()
    assert after["steps"] == before["steps"] == [6] and after["m"][0].tobytes() == before["m"][0].tobytes()


def test_adamw_refuses_what_makes_no_sense():
    p = leaf([1.0, 2.0])
    groups = [{"params": [p], "lr": 1}], [{"params": [p]}, p], [{"params": []}]
    for params in ([], [p, p], [cmha.tensor([1.0])], *groups):
        with pytest.raises(ValueError, match=r"^\[AdamW\] "):
            AdamW(params, 0.1)
    for params in (p, [1.0], [np.zeros(3)]):
        with pytest.raises(TypeError, match=r"^\[AdamW\] "):
            AdamW(params, 0.1)
    for options in (
        {"lr": -1}, {"lr": float("nan")}, {"betas": (0.9,)}, {"betas": (1.0, 0.9)}, {"betas": 3}, {"eps": -1},
        {"weight_decay": -0.1},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^\[AdamW\] "):
            AdamW([p], **{"lr": 0.1, **options})
    opt = AdamW([p], 0.1)
    with pytest.raises(ValueError):
        opt.lr = -0.1
    assert opt.lr == 0.1
    p._grad = cmha.tensor([1.0])  # p.grad = ... refuses it
    with pytest.raises(ValueError, match="shape"):
        opt.step()
    assert value(p).tolist() == [1.0, 2.0] and opt.state_dict()["steps"] == [0]


def test_lr_0_changes_no_bit():
    p = leaf([1.0, -3.0])
    give(p, 0.7)
    AdamW([p], 0.0).step()
    assert value(p).tolist() == [1.0, -3.0]


def test_clip_scales_all_gradients_by_one_factor():
    a, b, c = leaf([3.0, 0.0]), leaf([[0.0]]), leaf([1.0])
    give(a, [3.0, 0.0])
    give(b, 4.0)
    assert clip_grad_norm_([a, b, c], 10.0) == 5.0
    assert value(a.grad).tolist() == [3.0, 0.0]
    assert clip_grad_norm_(iter([a, b, c]), 1) == 5.0
    np.testing.assert_allclose([value(a.grad)[0], value(b.grad)[0, 0]], [0.6, 0.8], rtol=2e-7)
    assert c.grad is None


def test_clip_gradients_that_share_memory_once():
    a, b = leaf([3.0]), leaf([4.0])
    (a + b).backward()
    assert abs(clip_grad_norm_([a, b], 0.5) - math.sqrt(2)) < 1e-12
    np.testing.assert_allclose([value(a.grad)[0], value(b.grad)[0]], 0.5 / math.sqrt(2), rtol=2e-7)


def test_clip_names_the_first_gradient_that_is_not_finite():
    a, b = leaf([3.0]), leaf([[4.0, 1.0]])
    for bad in (np.nan, np.inf, -np.inf):
        give(a, 5.0)
        give(b, [[1.0, bad]])
        with pytest.raises(ValueError, match=r"^\[clip_grad_norm_\] .*parameter 1 of shape \(1, 2\)"):
            clip_grad_norm_([a, b], 1.0)
        assert value(a.grad)[0] == 5.0
    for bad in (0, -1, np.nan, np.inf):
        with pytest.raises(ValueError, match="max_norm"):
            clip_grad_norm_([a], bad)


def test_schedule():
    rate = [cosine_schedule(s, max_lr=2.0, min_lr=0.2, warmup_steps=3, decay_steps=11) for s in range(14)]
    np.testing.assert_allclose(rate[:4], [0.5, 1.0, 1.5, 2.0])
    np.testing.assert_allclose(rate[7], 1.1)
    assert rate[11:] == [0.2, 0.2, 0.2] and all(a > b for a, b in zip(rate[3:11], rate[4:12], strict=True))
    assert cosine_schedule(0, max_lr=1, min_lr=1, warmup_steps=0, decay_steps=0) == 1
    good = {"max_lr": 1.0, "min_lr": 0.1, "warmup_steps": 2, "decay_steps": 9}
    for bad in ({"min_lr": 2.0}, {"warmup_steps": 10}, {"max_lr": float("nan")}, {"decay_steps": -1}, {"min_lr": -1}):
        with pytest.raises(ValueError, match=r"^\[cosine_schedule\] "):
            cosine_schedule(3, **good | bad)
    with pytest.raises(ValueError):
        cosine_schedule(-1, **good)


def test_schedules_without_a_cosine():
    rate = [constant_schedule(s, max_lr=2.0, warmup_steps=3) for s in range(6)]
    np.testing.assert_allclose(rate, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    sizes = {"max_lr": 2.0, "min_lr": 0.5, "warmup_steps": 2, "decay_steps": 3, "steps": 9}
    rate = [wsd_schedule(s, **sizes) for s in range(12)]
    np.testing.assert_allclose(rate, [2 / 3, 4 / 3, 2, 2, 2, 2, 2, 1.5, 1.0, 0.5, 0.5, 0.5])
    assert wsd_schedule(8, **sizes | {"decay_steps": 0}) == 2.0
    for bad in ({"decay_steps": 8}, {"min_lr": 3.0}, {"warmup_steps": -1}, {"steps": 1.5}):
        with pytest.raises(ValueError, match=r"^\[wsd_schedule\] "):
            wsd_schedule(3, **sizes | bad)
    with pytest.raises(ValueError, match=r"^\[constant_schedule\] "):
        constant_schedule(-1, max_lr=1.0, warmup_steps=0)
    for name, last in (("cosine", 2e-3), ("constant", 2e-2), ("wsd", 2e-3)):
        settings = TrainSettings(steps=40, lr=2e-2, schedule=name)
        assert settings.warmup_steps == 4 and settings.rate(3) < 0.018 < settings.rate(4)
        np.testing.assert_allclose(settings.rate(40), last)
    settings = TrainSettings(steps=40, schedule="wsd")
    assert settings.decay_steps == 8 and settings.rate(32) == settings.lr > settings.rate(33)


def test_b35_a_batch_without_targets_changes_nothing():
    gpt = tiny()
    before = [value(p).copy() for p in gpt.parameters()]
    opt = AdamW(gpt.parameters(), 0.1, weight_decay=0)
    _, loss = gpt([[1, 2, 3]], [[-1, -1, -1]])
    assert loss.item() == 0.0
    loss.backward()
    assert clip_grad_norm_(gpt.parameters(), 1.0) == 0.0
    opt.step()
    assert all(value(p).tobytes() == b.tobytes() for p, b in zip(gpt.parameters(), before, strict=True))


TEXT = np.tile(np.array([1, 5, 2, 8, 3, 3, 9, 0, 4, 7]), 60)
CORPUS = Corpus.from_ids(TEXT[:500], TEXT[500:])


def trainer(folder=None, **settings):
    defaults = {"steps": 7, "batch_size": 3, "eval_interval": 3, "warmup_steps": 2, "lr": 0.01, "min_lr": 0.001}
    return Trainer(tiny(dropout=0.1), CORPUS, TrainSettings(**defaults | settings), folder, progress=False)


def digest(folder):
    return {name: (folder / "checkpoints" / name).read_bytes() for name in os.listdir(folder / "checkpoints")}


def test_a_run_logs_saves_and_repeats_to_the_bit(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        assert trainer(folder).run() is None
    rows = [json.loads(line) for line in (one / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 6, 7]
    keys = {"step", "loss", "val_loss", "lr", "grad_norm", "tokens_per_second"}
    assert all(set(row) == keys and all(v > 0 for v in row.values()) for row in rows)
    assert digest(one) == digest(two) and sorted(digest(one)) == ["step-6.safetensors", "step-7.safetensors"]
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if "tmp" in name]


def test_t1_training_learns():
    run = trainer(steps=400, eval_interval=400)
    start = run.evaluate()
    assert abs(start - math.log(11)) < 0.15
    run.run()
    assert run.rows[-1]["val_loss"] < 0.3 and run.rows[-1]["loss"] < start
    assert run.model.training


def test_overfitting_one_batch_brings_its_loss_to_zero():
    """The data is noise: nothing else than the one batch can be learnt."""
    noise = np.random.default_rng(4).integers(0, 11, 400)
    losses = {}
    for flag in (False, True):
        settings = TrainSettings(steps=250, batch_size=2, eval_interval=250, lr=0.02, overfit_one_batch=flag)
        run = Trainer(tiny(n_embd=16), Corpus.from_ids(noise[:350], noise[350:]), settings, progress=False)
        while run.step < 249:
            run._train_step()
        before = run._since["loss"]
        run._train_step()
        losses[flag] = run._since["loss"] - before
    assert losses[True] < 0.1 < 1.5 < losses[False]


def test_b41_validation_weighs_every_token_once():
    for part in (TEXT[500:], TEXT[: 7 * 35 + 1]):  # the second: 32 windows, then 3
        run = Trainer(tiny(), Corpus.from_ids(TEXT[:500], part), TrainSettings(), progress=False)
        windows = [part[i : i + 8] for i in range(0, len(part) - 7, 7)]
        run.model.eval()
        losses = [run.model(w[None, :-1], w[None, 1:])[1].item() for w in windows]
        assert abs(run.evaluate() - np.mean(losses)) < 1e-6


def poison(run, step, value):
    """From that step on a weight of the model is no number."""
    train_step = run._train_step

    def poisoned():
        if run.step == step:
            state = run.model.state_dict()
            weight = np.array(run.model.h[0].attn.c_q.weight.detach())
            weight[1, 2] = value
            run.model.load_state_dict(state | {"h.0.attn.c_q.weight": weight})
        return train_step()

    run._train_step = poisoned
    return run


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_t3_a_run_that_is_not_finite_names_step_and_weight_and_stops_before_it_saves(value, tmp_path):
    run = poison(trainer(tmp_path), 4, value)
    rule = r"^\[train\] loss must be finite; got .* at step 5 with a weight of h\.0\.attn\.c_q\.weight that is not$"
    with pytest.raises(ValueError, match=rule):
        run.run()
    assert [step for step, _ in checkpoints(tmp_path)] == [3]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_t3_a_gradient_that_is_not_finite_is_named(tmp_path, monkeypatch):
    run = trainer(tmp_path)
    forward = run.model.forward

    def burst(*batch):
        logits, loss = forward(*batch)
        return logits, loss if run.step < 4 else loss + (loss - loss.detach()).sqrt()  # its slope at 0

    monkeypatch.setattr(run.model, "forward", burst)
    with pytest.raises(ValueError, match=r"^\[train\] gradients must be finite; got .* for wte\.weight at step 5$"):
        run.run()
    assert [step for step, _ in checkpoints(tmp_path)] == [3]


def test_t3_a_step_that_breaks_the_weights_is_not_saved(tmp_path):
    """The gradient is finite, the update is not: a signal right after it must not put it over a good checkpoint."""
    run = trainer(tmp_path)
    step = run._train_step

    def last():
        step()
        if run.step == 5:
            signal.raise_signal(signal.SIGTERM)
            run.model.load_state_dict(run.model.state_dict() | {"ln_f.bias": np.full(6, np.inf, np.float32)})

    run._train_step = last
    with pytest.raises(ValueError, match=r"^\[train\] weights must be finite; got ln_f\.bias after step 5$"):
        run.run()
    assert [step for step, _ in checkpoints(tmp_path)] == [3]


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_ends_the_run_after_its_step(number, tmp_path):
    before = [signal.getsignal(n) for n in ENDINGS]
    run = trainer(tmp_path)
    step = run._train_step

    def signalled():
        if run.step == 4:
            signal.raise_signal(number)
        return step()

    run._train_step = signalled
    assert run.run() == number
    assert run.step == 5 and [step for step, _ in checkpoints(tmp_path)] == [3, 5]
    assert [signal.getsignal(n) for n in ENDINGS] == before
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [3]
    assert Checkpoint.read(checkpoints(tmp_path)[-1][1]).step == 5


def test_progress_drops_whole_fields():
    fields = [" 100/5000", "loss 1.873", "val 1.912", "00:34 left", "25,625 tokens/s"]
    for width, expected in ((79, 5), (59, 4), (44, 4), (43, 3), (39, 3), (32, 3), (31, 2), (21, 2)):
        assert fitted(fields, width) == "  ".join(fields[:expected]), width
    assert fitted(fields, 20) == fitted(fields, 10) == "loss 1.873" and fitted(fields, 9) == ""
    assert fitted(fields[:1], 9) == fields[0] and fitted(fields[:1], 8) == ""


def test_memory_is_counted(tmp_path):
    char = GPTConfig.char(vocab_size=103)
    need = {n: bytes_needed(char, n) for n in (1, 256, 512, 1024)}
    assert need[1024] - need[512] == 2 * (need[512] - need[256]) and need[1] > 16 * GPT(char).num_parameters()
    assert bytes_available(tmp_path, tmp_path) is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  7 kB\n")
    for limit, available in (("max", 7168), ("5000\n", 5000), ("9223372036854771712", 7168)):
        (tmp_path / "memory.max").write_text(limit)
        assert bytes_available(tmp_path, tmp_path) == available


def test_settings_are_checked():
    for bad in (
        {"steps": 0}, {"batch_size": 0}, {"lr": 0}, {"lr": float("nan")}, {"min_lr": 1.0}, {"grad_clip": 0},
        {"warmup_steps": 6000}, {"eval_interval": 0}, {"seed": -1}, {"weight_decay": -1}, {"steps": 1.5},
        {"schedule": "linear"}, {"micro_batch_size": 0}, {"micro_batch_size": 9}, {"sample_interval": 0},
        {"decay_steps": 3}, {"decay_steps": 4950, "schedule": "wsd"}, {"min_lr": float("inf")},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^\[train\] "):
            TrainSettings(**bad)
    with pytest.raises(ValueError, match=r"validation split .* 8 tokens; got 7"):
        Trainer(tiny(), Corpus.from_ids(TEXT, TEXT[:7]), TrainSettings())
    with pytest.raises(TypeError, match="overfit_one_batch must be a bool"):
        TrainSettings(overfit_one_batch="no")
