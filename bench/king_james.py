"""One training run, twice: cmha and PyTorch on the same text, weights, batches and learning rates.

    python bench/king_james.py TEXT [--torch-python PATH] [--threads N] [--steps N] [--json FILE]

TEXT is a text file; the committed numbers are those of the King James Bible (Debian's package bible-kjv:
`bible gen1:1-rev22:21 > kjv.txt`). The model is the preset `char` (4 layers, 128 wide, context 64), batches of 12,
AdamW with beta2 0.99 and weight decay 0.1 on matrices, gradients clipped at 1, warm-up and cosine: what
`cmha train TEXT --preset char --batch-size 12 --steps 2000` does. The sides take turns of 25 steps, each in a process
of its own that is stopped while the other computes; a time is that of training steps alone, validation is not in it.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from arguments import Parser, existing, output, positive, python

TURN = 25  # steps: short, so that what else the machine does meets both sides alike
SEED, LR, MIN_LR, WARMUP, BETAS, DECAY, CLIP = 0, 3e-3, 3e-4, 100, (0.9, 0.99), 0.1, 1.0
BATCH, WINDOWS = 12, 32  # windows of a training step, and of an evaluation at a time


def prepare(path, text, steps):
    """Everything both sides need, in one .npz: ids, offsets of every batch, learning rates, initial weights."""
    import cmha
    from cmha.text.corpora import open_data
    from cmha.train.batches import training_batch

    corpus = open_data([text], "char", 64)
    config = cmha.GPTConfig.char(vocab_size=corpus.tokenizer.vocab_size)
    T, positions = config.block_size, np.arange(len(corpus.training))
    batches = [training_batch(positions, BATCH, T, seed=SEED, step=step)[0][:, 0] for step in range(steps)]
    rates = {"max_lr": LR, "min_lr": MIN_LR, "warmup_steps": min(WARMUP, steps // 10), "decay_steps": steps}
    cmha.manual_seed(SEED)
    weights = {f"w.{name}": np.asarray(p.detach()) for name, p in cmha.GPT(config).named_parameters()}
    sizes = [config.vocab_size, T, config.n_layer, config.n_head, config.n_embd]
    lr = [cmha.cosine_schedule(step, **rates) for step in range(steps)]
    np.savez(path, training=corpus.training, validation=corpus.validation, offsets=np.array(batches), lr=lr,
             sizes=sizes, **weights)  # fmt: skip
    return {"tokens": len(corpus.training), "validation tokens": len(corpus.validation), "vocabulary": sizes[0],
            "parameters": int(sum(w.size for w in weights.values()))}  # fmt: skip


def windows(ids, offsets, T):
    rows = ids[offsets[:, None] + np.arange(T + 1)].astype(np.int64)
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def cmha_side(sizes, weights, threads):
    """(step(inputs, targets, lr) -> loss, loss_of(inputs, targets)), as for the other side."""
    import cmha
    from cmha.train import parameter_groups

    cmha.set_num_threads(threads)
    model = cmha.GPT(cmha.GPTConfig(*sizes))
    model.load_state_dict(weights)
    optimizer = cmha.AdamW(parameter_groups(model, DECAY), LR, betas=BETAS)
    model.train()

    def step(inputs, targets, lr):
        optimizer.lr = lr
        optimizer.zero_grad()
        _, loss = model(inputs, targets)
        loss.backward()
        cmha.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.item()

    def loss_of(inputs, targets):
        with cmha.no_grad():
            return model(inputs, targets)[1].item()

    return step, loss_of


def torch_side(sizes, weights, threads):
    import torch
    import torch.nn.functional as F
    from sides.torch_gpt import GPT

    torch.set_num_threads(threads)
    model = GPT(*sizes)
    model.load_weights({name: torch.tensor(w) for name, w in weights.items()})
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, LR, betas=BETAS, fused=True)

    def loss_tensor(inputs, targets):
        return F.cross_entropy(model(torch.from_numpy(inputs)).flatten(0, 1), torch.from_numpy(targets).flatten())

    def step(inputs, targets, lr):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        loss = loss_tensor(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.item()

    def loss_of(inputs, targets):
        with torch.inference_mode():
            return loss_tensor(inputs, targets).item()

    return step, loss_of


def serve(side, path, threads):
    """Answers lines of stdin: a number of steps with the seconds they took and their mean loss, `validate` with it."""
    data = np.load(path)
    arrays = {name: data[name] for name in data.files}
    sizes, T = arrays["sizes"].tolist(), int(arrays["sizes"][1])
    weights = {name[2:]: array for name, array in arrays.items() if name.startswith("w.")}
    step, loss_of = {"cmha": cmha_side, "torch": torch_side}[side](sizes, weights, threads)
    done = 0
    for line in sys.stdin:
        if line == "validate\n":
            ids, total = arrays["validation"], 0.0
            offsets = np.arange((len(ids) - 1) // T) * T
            for first in range(0, len(offsets), WINDOWS):
                inputs, targets = windows(ids, offsets[first : first + WINDOWS], T)
                total += loss_of(inputs, targets) * len(inputs)
            answer = {"val_loss": total / len(offsets)}
        else:
            losses, start = [], time.perf_counter()
            for n in range(done, done + int(line)):
                inputs, targets = windows(arrays["training"], arrays["offsets"][n], T)
                losses.append(step(inputs, targets, float(arrays["lr"][n])))
            answer = {"seconds": time.perf_counter() - start, "loss": sum(losses) / len(losses)}
            done += int(line)
        print(json.dumps(answer), flush=True)


class Side:
    """A process that answers, and is stopped while it has nothing to answer: no thread of it can spin."""

    def __init__(self, name, python, path, threads):
        from processes import Side as Environment

        env = Environment(name, name, python).environment(threads)
        command = [python, __file__, path, "--serve", name, "--threads", str(threads)]
        self.child = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds = []  # of each turn

    def ask(self, request):
        self.child.send_signal(signal.SIGCONT)
        self.child.stdin.write(f"{request}\n")
        self.child.stdin.flush()
        answer = self.child.stdout.readline()
        if not answer:
            raise SystemExit(f"king_james.py: error: a side ended with {self.child.wait()}")
        self.child.send_signal(signal.SIGSTOP)
        return json.loads(answer)

    def close(self):
        self.child.kill()
        self.child.wait()


def compare(args):
    with tempfile.TemporaryDirectory(prefix="cmha-bench-") as folder:
        path = os.path.join(folder, "run.npz")
        report = {"threads": args.threads, "steps": args.steps, **prepare(path, args.text, args.steps), "curve": []}
        pythons = {"cmha": sys.executable, "torch": args.torch_python}
        sides = {name: Side(name, python, path, args.threads) for name, python in pythons.items()}
        try:
            print("  step  loss cmha   torch  val cmha   torch  ms cmha   torch")
            for done in range(TURN, args.steps + 1, TURN):
                row = {"step": done}
                for name, side in sides.items():
                    answer = side.ask(TURN)
                    side.seconds.append(answer["seconds"])
                    row[name] = {"loss": answer["loss"], "ms": 1000 * answer["seconds"] / TURN}
                    if done % 500 == 0 or done == args.steps:
                        row[name] |= side.ask("validate")
                report["curve"].append(row)
                a, b = row["cmha"], row["torch"]
                if done % 100:
                    continue
                val = [f"{x['val_loss']:.4f}" if "val_loss" in x else "" for x in (a, b)]
                print(f"{done:6}  {a['loss']:9.4f}  {b['loss']:6.4f}  {val[0]:>8}  {val[1]:>6}  "
                      f"{a['ms']:7.1f}  {b['ms']:6.1f}", flush=True)  # fmt: skip
        finally:
            for side in sides.values():
                side.close()
    for what, value in {"in all": sum, "median turn": statistics.median, "fastest turn": min}.items():
        a, b = (value(side.seconds) * (1 if value is sum else args.steps / TURN) for side in sides.values())
        report[what] = {"cmha": a, "torch": b}
        print(f"{args.steps} steps by {what}: cmha {a:.1f} s, torch {b:.1f} s, which is {b / a:.2f} times as long")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main():
    parser = Parser("king_james.py", __doc__)
    parser.add_argument("text", metavar="TEXT", type=existing)
    parser.add_argument("--torch-python", type=python, metavar="PATH", default=sys.executable,
                        help="the Python that has PyTorch")  # fmt: skip
    parser.add_argument("--threads", type=positive, default=2, metavar="N")
    parser.add_argument("--steps", type=positive, default=2000, metavar="N", help=f"a multiple of {TURN}")
    parser.add_argument("--json", type=output, metavar="FILE", help="write everything measured to FILE")
    parser.add_argument("--serve", metavar="SIDE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps % TURN:
        parser.error(f"--steps must be a multiple of {TURN}; got {args.steps}")
    if args.serve:
        serve(args.serve, args.text, args.threads)
    else:
        compare(args)


if __name__ == "__main__":
    main()
