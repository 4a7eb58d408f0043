"""The miniature in PyTorch, for training only: target (MLA + MoE), INT4, DFlash drafter, optimiser.

Parameters are plain dicts under the published names; the routed experts of a layer are stacked,
[experts, out, in], until export. The formulas are those of DeepSeek-V3 as Kimi K2.6 uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Params = dict[str, torch.Tensor]

BOS, EOS = 4096, 4097  # the special ids start here: text never holds one
FIRST_SPECIAL = BOS
MASK = 4350
GROUP = 32  # INT4 quantisation group
LORA_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm
NORM_EPS = 1e-5
MAX_POSITIONS = 2048
REACH_FLOOR = 0.3  # weight of a draft token that no verify step is likely to reach


@dataclass(frozen=True)
class Rope:
    """YaRN with mscale = mscale_all_dim = 1, so cos and sin keep amplitude 1."""

    theta: float = 10000.0
    factor: float = 4.0
    original: int = 512
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class TargetShape:
    vocab: int = 4352
    hidden: int = 384
    layers: int = 6  # the first is dense
    heads: int = 8
    q_lora: int = 192
    kv_lora: int = 128
    nope: int = 64
    rope_dim: int = 32
    v_dim: int = 64
    dense_width: int = 1024
    experts: int = 16
    active: int = 4
    expert_width: int = 256
    scaling: float = 2.0
    taps: tuple[int, ...] = (1, 3, 5)
    rope: Rope = field(default_factory=Rope)

    @property
    def softmax_scale(self) -> float:
        mscale = 0.1 * math.log(self.rope.factor) + 1
        return (self.nope + self.rope_dim) ** -0.5 * mscale**2


@dataclass(frozen=True)
class DrafterShape:
    layers: int = 3
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    width: int = 1024
    block: int = 8
    window: int = 256
    rope: Rope = field(default_factory=Rope)


# ---- pieces ----------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in fp32, rounded to the activation type, then times the weight."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight.to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.to(x.dtype).t()


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(linear(x, gate)) * linear(x, up)


def rope_table(dim: int, rope: Rope, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [MAX_POSITIONS, dim / 2], float32 (YaRN, arXiv 2309.00071)."""

    def pair_of(rotations: float) -> float:
        wavelength = rope.original / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(rope.beta_fast)), 0)
    high = min(math.ceil(pair_of(rope.beta_slow)), dim - 1)
    base = rope.theta ** (-torch.arange(0, dim, 2).double() / dim)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    frequency = base / rope.factor * ramp + base * (1 - ramp)
    angle = torch.arange(MAX_POSITIONS).double()[:, None] * frequency
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(a: torch.Tensor, b: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (a, b) [T, heads, dim / 2] by angles [T, dim / 2]; halves are joined."""
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rope_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs are (x0, x1), (x2, x3) …; the result is in halves, as the reference code leaves it."""
    return rotate(x[..., 0::2].float(), x[..., 1::2].float(), cos, sin).to(x.dtype)


def rope_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotate(*x.float().chunk(2, -1), cos, sin).to(x.dtype)


def int4_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., in / 32, 32] in -8..7 (float) and bf16-rounded scales [..., in / 32, 1]."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).bfloat16().float().clamp_min(1e-8)
    return torch.round(groups / scale).clamp(-8, 7), scale


def fake_quantise(weight: torch.Tensor) -> torch.Tensor:
    """The INT4 value forward, the identity backward (straight-through)."""
    codes, scale = int4_codes(weight)
    return (codes * scale).flatten(-2).detach() + (weight - weight.detach())


def init_params(
    shapes: dict[str, tuple[int, ...]],
    std: Callable[[str, tuple[int, ...]], float],
    seed: int,
    device: torch.device,
) -> Params:
    """Norms are 1, the router bias 0, matrices normal with the deviation `std` gives."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, shape in shapes.items():
        if "norm" in name:
            value = torch.ones(shape)
        elif name.endswith("e_score_correction_bias"):
            value = torch.zeros(shape)
        else:
            value = torch.randn(shape, generator=generator) * std(name, shape)
        params[name] = value.to(device).requires_grad_(not name.endswith("correction_bias"))
    return params


# ---- target ----------------------------------------------------------------------------------


def target_shapes(s: TargetShape) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (s.vocab, s.hidden),
        "model.norm.weight": (s.hidden,),
        "lm_head.weight": (s.vocab, s.hidden),
    }
    for i in range(s.layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (s.hidden,),
            "post_attention_layernorm.weight": (s.hidden,),
            "self_attn.q_a_proj.weight": (s.q_lora, s.hidden),
            "self_attn.q_a_layernorm.weight": (s.q_lora,),
            "self_attn.q_b_proj.weight": (s.heads * (s.nope + s.rope_dim), s.q_lora),
            "self_attn.kv_a_proj_with_mqa.weight": (s.kv_lora + s.rope_dim, s.hidden),
            "self_attn.kv_a_layernorm.weight": (s.kv_lora,),
            "self_attn.kv_b_proj.weight": (s.heads * (s.nope + s.v_dim), s.kv_lora),
            "self_attn.o_proj.weight": (s.hidden, s.heads * s.v_dim),
        }
        prefix, width = "mlp.", s.dense_width
        if i > 0:
            prefix, width = "mlp.shared_experts.", s.expert_width
            layer["mlp.gate.weight"] = (s.experts, s.hidden)
            layer["mlp.gate.e_score_correction_bias"] = (s.experts,)
            for name in ("gate_proj", "up_proj"):
                layer[f"mlp.experts.{name}"] = (s.experts, s.expert_width, s.hidden)
            layer["mlp.experts.down_proj"] = (s.experts, s.hidden, s.expert_width)
        layer[f"{prefix}gate_proj.weight"] = (width, s.hidden)
        layer[f"{prefix}up_proj.weight"] = (width, s.hidden)
        layer[f"{prefix}down_proj.weight"] = (s.hidden, width)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _matrix_std(name: str, shape: tuple[int, ...]) -> float:
    """Projections that write to the residual stream start ten times smaller, the head at zero."""
    if name.startswith("lm_head"):
        return 0.0
    if "embed_tokens" in name:
        return 0.5
    if name.endswith("mlp.gate.weight"):
        return 0.02
    return 0.6 * shape[-1] ** -0.5 * (0.1 if "o_proj" in name or "down_proj" in name else 1.0)


def init_target(shape: TargetShape, seed: int, device: torch.device) -> Params:
    return init_params(target_shapes(shape), _matrix_std, seed, device)


def route(
    h: torch.Tensor, router: torch.Tensor, bias: torch.Tensor, s: TargetShape
) -> torch.Tensor:
    """Weights [T, experts], zero where not chosen; the bias takes part in the selection only."""
    scores = torch.sigmoid(h.float() @ router.bfloat16().float().t())
    chosen = torch.topk(scores.detach() + bias, s.active, -1).indices
    weights = scores.gather(1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * s.scaling
    return torch.zeros_like(scores).scatter(1, chosen, weights)


@dataclass(frozen=True)
class Forward:
    hidden: torch.Tensor  # [B * S, hidden], before the last norm
    load: torch.Tensor  # [MoE layers, experts], rows sent to each expert
    taps: list[torch.Tensor]  # outputs of the tap layers, [B * S, hidden]


class Target:
    """The target as functions of flattened rows [B * S]: every batch shape shares one graph."""

    def __init__(
        self, shape: TargetShape, params: Params, compiled: bool, like: Target | None = None
    ):
        self.shape, self.params = shape, params
        self.device = params["model.norm.weight"].device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.cos, self.sin = rope_table(shape.rope_dim, shape.rope, self.device)
        if like is not None:  # shares what is compiled
            self._qkv, self._dense, self._moe = like._qkv, like._dense, like._moe
            self._loss, self._fake = like._loss, like._fake
            return
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self._qkv, self._dense, self._moe = map(wrap, self._functions())
        self._loss, self._fake = wrap(self._token_loss), wrap(fake_quantise)

    def _functions(self) -> tuple[Callable, Callable, Callable]:
        s = self.shape

        def qkv(x, norm, q_a, q_norm, q_b, kv_a, kv_norm, kv_b, cos, sin):
            rows = x.shape[0]
            h = rms_norm(x, norm, NORM_EPS)
            q = linear(rms_norm(linear(h, q_a), q_norm, LORA_EPS), q_b)
            q_nope, q_pe = q.view(rows, s.heads, -1).split([s.nope, s.rope_dim], -1)
            latent, k_pe = linear(h, kv_a).split([s.kv_lora, s.rope_dim], -1)
            kv = linear(rms_norm(latent, kv_norm, LORA_EPS), kv_b).view(rows, s.heads, -1)
            k_nope, v = kv.split([s.nope, s.v_dim], -1)
            k_pe = rope_interleaved(k_pe[:, None], cos, sin).expand(rows, s.heads, s.rope_dim)
            q = torch.cat([q_nope, rope_interleaved(q_pe, cos, sin)], -1)
            # V is padded to the width of K: the fused attention wants one head size.
            return q, torch.cat([k_nope, k_pe], -1), F.pad(v, (0, s.nope + s.rope_dim - s.v_dim))

        def dense(x, attention, o, norm, gate, up, down):
            x = x + linear(attention, o)
            return x + linear(swiglu(rms_norm(x, norm, NORM_EPS), gate, up), down)

        def moe(x, attention, o, norm, router, bias, s_gate, s_up, s_down, gate, up, down):
            # Every expert on every row, weighted by zero where not chosen: at this size one dense
            # GEMM is faster than gathering rows.
            x = x + linear(attention, o)
            h = rms_norm(x, norm, NORM_EPS)
            weights = route(h, router, bias, s)
            act = swiglu(h, gate.flatten(0, 1), up.flatten(0, 1))
            act = act.view(-1, s.experts, s.expert_width) * weights.to(x.dtype)[:, :, None]
            y = linear(act.flatten(1), down.permute(1, 0, 2).flatten(1))
            y = y + linear(swiglu(h, s_gate, s_up), s_down)
            return x + y, (weights.detach() > 0).float().sum(0)

        return qkv, dense, moe

    @staticmethod
    def _token_loss(x, norm, head, labels):
        logits = linear(rms_norm(x, norm, NORM_EPS), head).float()
        return F.cross_entropy(logits, labels, reduction="none")

    def layer(self, index: int, *names: str) -> list[torch.Tensor]:
        return [self.params[f"model.layers.{index}.{name}"] for name in names]

    def frozen_int4(self) -> Target:
        """A copy whose experts are the dequantised INT4 weights; it trains no further.

        The tensors still ask for gradients, which keeps them on the graphs compiled in training.
        """
        params = {}
        for name, p in self.params.items():
            value = p.detach().clone()
            if ".experts." in name:
                codes, scale = int4_codes(value)
                value = (codes * scale).flatten(-2)
            params[name] = value.requires_grad_(p.requires_grad)
        return Target(self.shape, params, compiled=False, like=self)

    def forward(self, ids: torch.Tensor, quantise: bool = False, taps: bool = False) -> Forward:
        """ids [B, S] int64, positions from 0."""
        s, (batch, length) = self.shape, ids.shape
        cos, sin = self.cos[:length].repeat(batch, 1), self.sin[:length].repeat(batch, 1)
        x = F.embedding(ids.flatten(), self.params["model.embed_tokens.weight"]).to(self.dtype)
        loads, tapped = [], []
        for i in range(s.layers):
            qkv = self._qkv(x, *self.layer(i, *ATTENTION), cos, sin)
            q, k, v = (t.view(batch, length, s.heads, -1).transpose(1, 2) for t in qkv)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=s.softmax_scale)
            a = a[..., : s.v_dim].transpose(1, 2).reshape(batch * length, -1)
            if i == 0:
                x = self._dense(x, a, *self.layer(i, *DENSE))
            else:
                experts = self.layer(i, *EXPERTS)
                if quantise:
                    experts = [self._fake(w) for w in experts]
                x, load = self._moe(x, a, *self.layer(i, *MOE), *experts)
                loads.append(load)
            if taps and i in s.taps:
                tapped.append(x.detach())
        return Forward(x, torch.stack(loads), tapped)

    def losses(
        self, ids: torch.Tensor, quantise: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Nats of every next token [B * (S - 1)], and the experts' load, for ids [B, S]."""
        out = self.forward(ids[:, :-1], quantise)
        norm, head = self.params["model.norm.weight"], self.params["lm_head.weight"]
        return self._loss(out.hidden, norm, head, ids[:, 1:].flatten()), out.load


ATTENTION = (
    "input_layernorm.weight",
    "self_attn.q_a_proj.weight",
    "self_attn.q_a_layernorm.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_a_layernorm.weight",
    "self_attn.kv_b_proj.weight",
)
_OUT = ("self_attn.o_proj.weight", "post_attention_layernorm.weight")
DENSE = (*_OUT, "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
MOE = (
    *_OUT,
    "mlp.gate.weight",
    "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight",
    "mlp.shared_experts.down_proj.weight",
)
EXPERTS = ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")


class Decoder:
    """Token-by-token decoding of many rows at one position, with a latent cache (absorbed MLA)."""

    def __init__(self, target: Target):
        self.target, s = target, target.shape
        keep = (".gate.weight", "correction_bias")  # the router works in fp32
        self.params = {
            n: p.detach() if n.endswith(keep) else p.detach().to(target.dtype)
            for n, p in target.params.items()
        }
        self.absorb, self.down = [], []
        for i in range(s.layers):
            (kv_b,) = self.layer(i, "self_attn.kv_b_proj.weight")
            kv_b = kv_b.view(s.heads, s.nope + s.v_dim, s.kv_lora)
            self.absorb.append(kv_b.split([s.nope, s.v_dim], 1))
            if i == 0:
                self.down.append(None)  # the dense layer
                continue
            (down,) = self.layer(i, "mlp.experts.down_proj")
            self.down.append(down.permute(1, 0, 2).flatten(1).contiguous())

    def layer(self, index: int, *names: str) -> list[torch.Tensor]:
        return [self.params[f"model.layers.{index}.{name}"] for name in names]

    def _attention(
        self, x: torch.Tensor, i: int, cache: torch.Tensor, position: int
    ) -> torch.Tensor:
        s, t = self.target.shape, self.target
        rows = x.shape[0]
        cos, sin = (table[position].expand(rows, -1) for table in (t.cos, t.sin))
        norm, q_a, q_norm, q_b, kv_a, kv_norm, _ = self.layer(i, *ATTENTION)
        h = rms_norm(x, norm, NORM_EPS)
        q = linear(rms_norm(linear(h, q_a), q_norm, LORA_EPS), q_b).view(rows, s.heads, -1)
        latent, k_pe = linear(h, kv_a).split([s.kv_lora, s.rope_dim], -1)
        cache[:, position, : s.kv_lora] = rms_norm(latent, kv_norm, LORA_EPS)
        cache[:, position, s.kv_lora :] = rope_interleaved(k_pe[:, None], cos, sin)[:, 0]
        k_up, v_up = self.absorb[i]
        q_nope, q_pe = q.split([s.nope, s.rope_dim], -1)
        q_nope = torch.einsum("bhd,hdc->bhc", q_nope, k_up)
        q = torch.cat([q_nope, rope_interleaved(q_pe, cos, sin)], -1)
        # The heads share one key: they are the "query positions" of an attention with one head.
        # Not cuDNN's attention, which plans anew (60 ms) for every length.
        keys = cache[:, None, : position + 1]
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            a = F.scaled_dot_product_attention(q[:, None], keys, keys, scale=s.softmax_scale)
        return torch.einsum("bhc,hvc->bhv", a[:, 0, :, : s.kv_lora], v_up).flatten(1)

    def _mlp(self, x: torch.Tensor, a: torch.Tensor, i: int) -> torch.Tensor:
        s = self.target.shape
        if i == 0:
            o, norm, gate, up, down = self.layer(i, *DENSE)
            x = x + linear(a, o)
            return x + linear(swiglu(rms_norm(x, norm, NORM_EPS), gate, up), down)
        o, norm, router, bias, s_gate, s_up, s_down = self.layer(i, *MOE)
        gate, up, _ = self.layer(i, *EXPERTS)
        x = x + linear(a, o)
        h = rms_norm(x, norm, NORM_EPS)
        weights = route(h, router, bias, s).to(x.dtype)
        act = swiglu(h, gate.flatten(0, 1), up.flatten(0, 1))
        act = act.view(-1, s.experts, s.expert_width) * weights[:, :, None]
        y = linear(act.flatten(1), self.down[i])
        return x + y + linear(swiglu(h, s_gate, s_up), s_down)

    @torch.no_grad()
    def continue_text(
        self,
        ids: torch.Tensor,
        given: torch.Tensor,
        temperature: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """ids [B, S] with the first `given` [B] tokens of each row kept and the rest sampled.

        Temperature [B], 0 = greedy. Special ids are never drawn.
        """
        s, t = self.target.shape, self.target
        ids, (batch, length) = ids.clone(), ids.shape
        shape = (s.layers, batch, length, s.kv_lora + s.rope_dim)
        caches = torch.zeros(shape, device=t.device, dtype=t.dtype)
        first = int(given.min())
        for position in range(length - 1):
            x = self.params["model.embed_tokens.weight"][ids[:, position]]
            for i in range(s.layers):
                x = self._mlp(x, self._attention(x, i, caches[i], position), i)
            if position + 1 < first:
                continue
            x = rms_norm(x, self.params["model.norm.weight"], NORM_EPS)
            logits = linear(x, self.params["lm_head.weight"]).float()[:, :FIRST_SPECIAL]
            # Gumbel noise, -log of an exponential variable: argmax then draws from the softmax.
            noise = -torch.empty_like(logits).exponential_(generator=generator).log()
            noise *= (temperature > 0)[:, None]
            drawn = (logits / temperature.clamp_min(1e-6)[:, None] + noise).argmax(-1)
            ids[:, position + 1] = torch.where(given > position + 1, ids[:, position + 1], drawn)
        return ids


# ---- drafter ---------------------------------------------------------------------------------


def drafter_shapes(t: TargetShape, d: DrafterShape) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (t.hidden, t.hidden * len(t.taps)),
        "hidden_norm.weight": (t.hidden,),
        "norm.weight": (t.hidden,),
    }
    for i in range(d.layers):
        layer = {
            "input_layernorm.weight": (t.hidden,),
            "post_attention_layernorm.weight": (t.hidden,),
            "self_attn.q_proj.weight": (d.heads * d.head_dim, t.hidden),
            "self_attn.k_proj.weight": (d.kv_heads * d.head_dim, t.hidden),
            "self_attn.v_proj.weight": (d.kv_heads * d.head_dim, t.hidden),
            "self_attn.o_proj.weight": (t.hidden, d.heads * d.head_dim),
            "self_attn.q_norm.weight": (d.head_dim,),
            "self_attn.k_norm.weight": (d.head_dim,),
            "mlp.gate_proj.weight": (d.width, t.hidden),
            "mlp.up_proj.weight": (d.width, t.hidden),
            "mlp.down_proj.weight": (t.hidden, d.width),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def init_drafter(t: TargetShape, d: DrafterShape, seed: int, device: torch.device) -> Params:
    return init_params(drafter_shapes(t, d), _matrix_std, seed, device)


@torch.no_grad()
def chosen_noise(hidden, head, temperature, labels):
    """Gumbel noise [R, vocab] that makes the target (hidden, after the last norm) draw `labels`.

    It has the distribution of the noise that was drawn, given the token that it chose: the largest
    of logits / T + noise is free of which token that is, and the others are cut off there. Rows of
    temperature 0 get noise too, to be multiplied by 0.
    """
    log_p = torch.log_softmax(
        linear(hidden, head).float() / temperature.clamp_min(0.05)[:, None], -1
    )
    log_p = log_p.clamp_min(-60)  # exp(60) is still a float32
    own = labels[:, None] == torch.arange(log_p.shape[1], device=labels.device)
    # -log of an exponential variable is Gumbel noise; exp(-value) is what adds.
    exponential = -torch.log(torch.rand_like(log_p).clamp(2**-24, 1 - 2**-24))
    largest = -torch.log(torch.rand_like(log_p[:, :1]).clamp(2**-24, 1 - 2**-24))
    others = -torch.log(largest + exponential * torch.exp(-log_p))
    return torch.where(own, -torch.log(largest), others) - log_p


class Drafter:
    """DFlash: one non-causal pass over [root, MASK × (block - 1)] and the tapped context."""

    def __init__(self, target: Target, shape: DrafterShape, params: Params, compiled: bool):
        self.target, self.shape, self.params = target, shape, params
        self.cos, self.sin = rope_table(shape.head_dim, shape.rope, target.device)
        # Both are fixed: the drafter borrows them from the target.
        self.embedding = target.params["model.embed_tokens.weight"].detach()
        self.head = target.params["lm_head.weight"].detach()
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self._context, self._kv, self._qkv, self._mlp = map(wrap, self._functions())
        self.loss, self.noisy_loss = wrap(self._block_loss), wrap(self._noisy_loss)
        self.noise = wrap(chosen_noise)

    def _functions(self) -> tuple[Callable, Callable, Callable, Callable]:
        d = self.shape

        def context(taps, fc, norm):
            return rms_norm(linear(taps, fc), norm, NORM_EPS)

        def kv(h, k, v, k_norm, cos, sin):
            k = rms_norm(linear(h, k).view(-1, d.kv_heads, d.head_dim), k_norm, NORM_EPS)
            return rope_halves(k, cos, sin), linear(h, v).view(-1, d.kv_heads, d.head_dim)

        def qkv(x, norm, q, k, v, q_norm, k_norm, cos, sin):
            h = rms_norm(x, norm, NORM_EPS)
            q = rms_norm(linear(h, q).view(-1, d.heads, d.head_dim), q_norm, NORM_EPS)
            return rope_halves(q, cos, sin), *kv(h, k, v, k_norm, cos, sin)

        def mlp(x, attention, o, norm, gate, up, down):
            x = x + linear(attention, o)
            return x + linear(swiglu(rms_norm(x, norm, NORM_EPS), gate, up), down)

        return context, kv, qkv, mlp

    @staticmethod
    def _block_loss(x, norm, head, target_hidden, temperature, labels, weight):
        """Weighted cross-entropy: hard labels on greedy rows, else the target's softmax."""
        log_p = torch.log_softmax(linear(rms_norm(x, norm, NORM_EPS), head).float(), -1)
        teacher = linear(target_hidden, head).float() / temperature.clamp_min(0.05)[:, None]
        soft = -(torch.softmax(teacher, -1) * log_p).sum(-1)
        hard = -log_p.gather(1, labels[:, None])[:, 0]
        loss = torch.where(temperature > 0, soft, hard) * weight
        return loss.sum() / weight.sum(), log_p.argmax(-1) == labels

    @staticmethod
    def _noisy_loss(x, norm, head, noise, temperature, labels, weight):
        """Cross-entropy of what the engine ranks: logits plus temperature * the target's noise.

        weight [positions of a block]; a position counts in full where the drafter's probability of
        its token and those before is high, because only there a verify step can gain.
        """
        logits = linear(rms_norm(x, norm, NORM_EPS), head).float()
        log_p = torch.log_softmax(logits + temperature[:, None] * noise, -1)
        of_label = log_p.gather(1, labels[:, None]).view(-1, len(weight))
        reach = torch.exp(of_label.detach().cumsum(1) / 2)
        share = weight * (REACH_FLOOR + (1 - REACH_FLOOR) * reach)
        return -(of_label * share).sum() / share.sum(), log_p.argmax(-1) == labels

    def layer(self, index: int, *names: str) -> list[torch.Tensor]:
        return [self.params[f"layers.{index}.{name}.weight"] for name in names]

    def forward(self, ids: torch.Tensor, taps: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        """Hidden rows [B, A, block, hidden] before the last norm.

        ids [B, S]; taps [B, S, taps * hidden]; roots [B, A], positions of the last committed token.
        A query at position p sees context positions c < root with p - c < window, and its block.
        """
        d = self.shape
        (batch, length), count = ids.shape, roots.shape[1]
        queries, device = count * d.block, ids.device
        tokens = torch.full((batch, count, d.block), MASK, device=device)
        tokens[:, :, 0] = ids.gather(1, roots)
        x = F.embedding(tokens.flatten(), self.embedding).to(taps.dtype).requires_grad_()
        at = (roots[:, :, None] + torch.arange(d.block, device=device)).view(batch, queries)
        cos, sin = self.cos[at.flatten()], self.sin[at.flatten()]
        c_cos, c_sin = self.cos[:length].repeat(batch, 1), self.sin[:length].repeat(batch, 1)
        context = self._context(
            taps.flatten(0, 1), self.params["fc.weight"], self.params["hidden_norm.weight"]
        )
        key = torch.arange(length, device=device)
        root = roots.repeat_interleave(d.block, 1)
        seen = (key < root[:, :, None]) & (key > at[:, :, None] - d.window)
        block = torch.arange(queries, device=device) // d.block
        own = (block[:, None] == block).expand(batch, queries, queries)
        mask = torch.cat([seen, own], -1)[:, None]

        def joined(of_context: torch.Tensor, of_block: torch.Tensor) -> torch.Tensor:
            parts = [t.view(batch, -1, d.kv_heads, d.head_dim) for t in (of_context, of_block)]
            return torch.cat(parts, 1).transpose(1, 2).repeat_interleave(d.heads // d.kv_heads, 1)

        for i in range(d.layers):
            norm, q, k, v, q_norm, k_norm = self.layer(i, *DRAFTER_ATTENTION)
            context_kv = self._kv(context, k, v, k_norm, c_cos, c_sin)
            q, *block_kv = self._qkv(x, norm, q, k, v, q_norm, k_norm, cos, sin)
            keys, values = map(joined, context_kv, block_kv)
            q = q.view(batch, queries, d.heads, d.head_dim).transpose(1, 2)
            a = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            a = a.transpose(1, 2).reshape(batch * queries, -1)
            x = self._mlp(x, a, *self.layer(i, *DRAFTER_MLP))
        return x.view(batch, count, d.block, -1)


DRAFTER_ATTENTION = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
)
DRAFTER_MLP = (
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


# ---- optimiser -------------------------------------------------------------------------------


def orthogonalise(update: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix (Muon), [n, rows, columns]."""
    x = update.bfloat16() if update.is_cuda else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return x


class Optimiser:
    """Muon for matrices (one batch a shape), AdamW for vectors and named exceptions."""

    def __init__(
        self,
        params: Params,
        adam_rates: dict[str, float],
        vector_rate: float = 0.004,
        muon_rate: float = 0.02,
        weight_decay: float = 0.03,
    ):
        self.rate, self.decay = muon_rate, weight_decay
        self.groups: dict[tuple[int, int], list[torch.Tensor]] = {}
        adam: dict[float, list[torch.Tensor]] = {}
        for name, p in params.items():
            if not p.requires_grad:
                continue
            special = [rate for part, rate in adam_rates.items() if part in name]
            if special or p.dim() == 1:
                adam.setdefault(special[0] if special else vector_rate, []).append(p)
            else:
                rows, columns = sorted(p.shape[-2:])
                self.groups.setdefault((rows, columns), []).append(p)
        self.momentum = {p: torch.zeros_like(p) for group in self.groups.values() for p in group}
        settings = [{"params": ps, "lr": rate, "base": rate} for rate, ps in adam.items()]
        self.adam = torch.optim.AdamW(
            settings,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=next(iter(params.values())).is_cuda,
        )

    @torch.no_grad()
    def step(self, scale: float, momentum: float) -> None:
        """One update with every rate times `scale`; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for (rows, _), params in self.groups.items():
            buffers, grads = [self.momentum[p] for p in params], [p.grad for p in params]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            updates = torch._foreach_lerp(grads, buffers, momentum)  # Nesterov
            wide = [u.flatten(0, -3) if u.dim() > 2 else u[None] for u in updates]
            wide = [u if u.shape[-2] == rows else u.mT for u in wide]
            parts = orthogonalise(torch.cat(wide)).split([len(u) for u in wide])
            for p, u in zip(params, parts, strict=True):
                u = u if p.shape[-2] == rows else u.mT
                rate = self.rate * scale
                p.mul_(1 - rate * self.decay)
                gain = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.add_(u.reshape(p.shape).to(p.dtype), alpha=-rate * gain)
                p.grad = None
