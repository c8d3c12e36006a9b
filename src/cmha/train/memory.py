"""What a run will need, counted before anything of it exists: a machine that swaps or kills explains nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cmha.errors import message
from cmha.train.accumulate import OneProcess
from cmha.train.batches import validation_batch_size

if TYPE_CHECKING:
    from cmha.gpt import GPTConfig
    from cmha.train.settings import TrainSettings

ALONE = OneProcess()


def bytes_needed(
    config: GPTConfig, batch_size: int, micro_batches: int = 1, checkpoint_activations: bool = False, processes: int = 1
) -> int:
    """Bytes of one process at the peak of a training step, of an evaluation or of a save, whichever is the most.

    batch_size windows go through the model at a time, micro_batches times a step on each of the processes.

    Floats per parameter: its value, two moments and its gradient, ceil(log2 micro_batches) + 1 times (accumulate.py);
    the table of tokens once more, whose two gradients are added; while saving, a copy of each moment more; with several
    processes, a row of all gradients to send and half of one that comes in. Floats per token that the backward pass
    finds again:

        16 D a layer   the two norms, q, k, v, attention's result, c_proj, two sums, c_fc and GELU (4 D each), MLP
         2 H a layer   attention's maximum and sum
         8 D           the embeddings and their sum, the last norm, gradients on their way down
         2 V           logits and their gradient
           6           the ids of inputs, targets and window, 8 bytes each

    With checkpoint_activations it is D a layer, and 20 D + 2 H for the one that is run again.
    Measured peaks are within a few per cent of it, from 1 to 8 layers and 50 to 5,000 tokens in the vocabulary.
    """
    V, T, L, H, D = config.vocab_size, config.block_size, config.n_layer, config.n_head, config.n_embd
    parameters = (V + T) * D + L * 12 * D * D
    layers = L * D + 20 * D + 2 * H if checkpoint_activations else L * (16 * D + 2 * H)
    step = batch_size * T * (layers + 8 * D + 2 * V + 6) + V * D
    evaluation = validation_batch_size(T) * T * (10 * D + V)  # without a graph: one layer at a time
    more_gradients = ((micro_batches - 1).bit_length() + (1.5 if processes > 1 else 0)) * parameters
    return int(4 * (4 * parameters + max(step + more_gradients, evaluation, 2 * parameters)))


def bytes_available(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the system can give without swapping, at most the container's limit; None where it does not say."""
    found = []
    for path in (cgroup / "memory.max", cgroup / "memory/memory.limit_in_bytes"):
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # another system, or "max"
            pass
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    return min(found, default=None)


def check_memory(config: GPTConfig, settings: TrainSettings, processes: OneProcess = ALONE) -> None:
    """A MemoryError with the figures where a run of this model with these settings cannot fit."""
    size, share = settings.micro_batch_size, -(-settings.micro_batches // processes.size)
    need = bytes_needed(config, size, share, settings.checkpoint_activations, processes.size) * processes.here
    have = bytes_available()
    if have is not None and need > have:
        here = f" in each of {processes.here} processes" if processes.here > 1 else ""
        got = f"about {need / 2**30:,.1f} GiB for {size:,} windows at a time{here}, of {have / 2**30:,.1f} GiB"
        hint = "Less: --micro-batch-size, --checkpoint-activations"
        raise MemoryError(message("train", "model and batch must fit in the memory that is free", got, hint=hint))
