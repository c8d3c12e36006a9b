"""Optimiser, schedule, checkpoints and the loop."""

import json
import math
import os
import signal

import numpy as np
import pytest

import cmha
from cmha import GPT, AdamW, GPTConfig, clip_grad_norm_, cosine_schedule
from cmha.errors import CheckpointError
from cmha.train import Trainer, TrainSettings, parameter_groups
from cmha.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from cmha.train.memory import bytes_available, bytes_needed
from cmha.train.progress import fitted


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


def trainer(folder=None, **settings):
    defaults = {"steps": 7, "batch_size": 3, "eval_interval": 3, "warmup_steps": 2, "lr": 0.01, "min_lr": 0.001}
    settings = defaults | settings
    return Trainer(tiny(dropout=0.1), TEXT[:500], TEXT[500:], TrainSettings(**settings), folder, progress=False)


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


def test_training_learns():
    run = trainer(steps=400, eval_interval=400)
    start = run.evaluate()
    assert abs(start - math.log(11)) < 0.15
    run.run()
    assert run.rows[-1]["val_loss"] < 0.3 and run.rows[-1]["loss"] < start
    assert run.model.training


def test_b41_validation_weighs_every_token_once():
    run = trainer()
    for run.validation in (TEXT[500:], TEXT[: 7 * 35 + 1]):  # the second: 32 windows, then 3
        windows = [run.validation[i : i + 8] for i in range(0, len(run.validation) - 7, 7)]
        run.model.eval()
        losses = [run.model(w[None, :-1], w[None, 1:])[1].item() for w in windows]
        assert abs(run.evaluate() - np.mean(losses)) < 1e-6


def test_checkpoint_goes_on_to_the_bit(tmp_path):
    whole = trainer()
    whole.run()
    first = trainer()
    while first.step < 4:
        first._train_step()
    path = save_checkpoint(tmp_path, first.model, first.optimizer, first.step, first.settings)
    second = trainer(seed=first.settings.seed)
    second.step = load_checkpoint(path, second.model, second.optimizer)
    assert second.step == 4
    second.run()
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert value(a).tobytes() == value(b).tobytes()


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    run = trainer()
    path = save_checkpoint(tmp_path, run.model, run.optimizer, 0, run.settings)
    other = Trainer(tiny(n_embd=8), TEXT[:500], TEXT[500:], run.settings, progress=False)
    before = [value(p).copy() for p in other.model.parameters()]
    with pytest.raises(CheckpointError, match=r"step-0\.safetensors"):
        load_checkpoint(path, other.model, other.optimizer)
    run.model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="format"):
        load_checkpoint(tmp_path / "model.safetensors", run.model, run.optimizer)
    assert all(value(p).tobytes() == b.tobytes() for p, b in zip(other.model.parameters(), before, strict=True))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_t3_a_run_that_is_not_finite_stops_before_it_saves(poison, tmp_path):
    run = trainer(tmp_path)
    step = run._train_step

    def poisoned():
        if run.step == 4:
            state = run.model.state_dict()
            weight = np.array(value(run.model.h[0].attn.c_q.weight))
            weight[1, 2] = poison
            run.model.load_state_dict(state | {"h.0.attn.c_q.weight": weight})
        return step()

    run._train_step = poisoned
    with pytest.raises(ValueError, match=r"^\[train\] .* must be finite; got .* at step 5$"):
        run.run()
    assert [step for step, _ in checkpoints(tmp_path)] == [3]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_after_its_step(number, tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(n) for n in numbers]
    run = trainer(tmp_path)
    step = run._train_step

    def signalled():
        if run.step == 4:
            os.kill(os.getpid(), number)
        return step()

    run._train_step = signalled
    assert run.run() == number
    assert run.step == 5 and [step for step, _ in checkpoints(tmp_path)] == [3, 5]
    assert [signal.getsignal(n) for n in numbers] == before
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["step"] == 5


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
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^\[train\] "):
            TrainSettings(**bad)
    with pytest.raises(ValueError, match=r"validation split .* 8 tokens; got 7"):
        Trainer(tiny(), TEXT, TEXT[:7], TrainSettings())
