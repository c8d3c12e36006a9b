"""The same GPT-2 in plain PyTorch, after nanoGPT: one product for q, k and v, flash attention, a tied output layer."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Named(nn.Module):
    """Takes and gives weights under cmha's names and layout: linear weights (in, out), c_q c_k c_v apart."""

    def load_weights(self, weights):
        own = {}
        for name, p in self.named_parameters():
            if "c_attn" in name:
                w = torch.cat([weights[name.replace("c_attn", part)] for part in ("c_q", "c_k", "c_v")], -1)
            else:
                w = weights[name]
            own[name] = w.T if self.is_linear(name, p) else w
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(own[name])

    @staticmethod
    def is_linear(name, p):
        return p.ndim == 2 and "wte" not in name and "wpe" not in name

    @classmethod
    def our_names(cls, tensors):
        found = {}
        for name, t in tensors.items():
            t = t.T if cls.is_linear(name, t) else t
            if "c_attn" in name:
                parts = t.chunk(3, -1)
                found |= {name.replace("c_attn", part): p for part, p in zip(("c_q", "c_k", "c_v"), parts, strict=True)}
            else:
                found[name] = t
        return found


class SelfAttention(Named):
    def __init__(self, D, H):
        super().__init__()
        self.H = H
        self.c_attn = nn.Linear(D, 3 * D)
        self.c_proj = nn.Linear(D, D)

    def forward(self, x, past=None, start=0):
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.H, D // self.H).transpose(1, 2) for t in self.c_attn(x).split(D, 2))
        if past is not None:
            past[0][:, :, start : start + T], past[1][:, :, start : start + T] = k, v
            k, v = past[0][:, :, : start + T], past[1][:, :, : start + T]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    def __init__(self, D):
        super().__init__()
        self.c_fc = nn.Linear(D, 4 * D)
        self.c_proj = nn.Linear(4 * D, D)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, D, H):
        super().__init__()
        self.ln_1 = nn.LayerNorm(D)
        self.attn = SelfAttention(D, H)
        self.ln_2 = nn.LayerNorm(D)
        self.mlp = MLP(D)

    def forward(self, x, past, start):
        x = x + self.attn(self.ln_1(x), past, start)
        return x + self.mlp(self.ln_2(x))


class GPT(Named):
    def __init__(self, V, block, L, H, D):
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.wpe = nn.Embedding(block, D)
        self.h = nn.ModuleList(Block(D, H) for _ in range(L))
        self.ln_f = nn.LayerNorm(D)

    def forward(self, ids, past=None, start=0, last=False):
        x = self.wte(ids) + self.wpe.weight[start : start + ids.shape[1]]
        for i, block in enumerate(self.h):
            x = block(x, None if past is None else past[i], start)
        return F.linear(self.ln_f(x[:, -1] if last else x), self.wte.weight)
