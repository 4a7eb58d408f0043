"""Trains the miniature `models/nano/` from scratch on one GPU, in minutes.

Four phases share a budget of wall time: the target in bf16 at context 512; a straight-through INT4
fine-tune of its experts at context 2048; continuations of unseen text by the INT4 target; the
DFlash drafter on those. Then everything is evaluated on held-out text. Writes into --out, each as
soon as it is known: `target-N.safetensors` and `drafter.safetensors` (published names and dtypes,
for tools/export_nano.py) and `results.json`.

    python tools/nano_data.py --out build/nano --tests tests/data
    python tools/train_nano.py --data build/nano --out build/nano/run --seconds 510
    python tools/export_nano.py --data build/nano --run build/nano/run --out models/nano

`--more-drafting models/nano` is a phase of its own. It starts from the published weights, leaves
the target as it is, has it write new continuations and trains the drafter on them, now with the
noise that the engine drafts with. It writes `drafter.safetensors` and `drafting.json`:

    python tools/train_nano.py --data build/nano --out build/nano/more --seconds 320 \\
        --more-drafting models/nano
    python tools/export_nano.py --run build/nano/more --out models/nano --drafter-only

`--toy` runs all of it in minutes on a CPU, with shapes too small to learn anything (more drafting:
the true shapes, a few steps).
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from nano_model import (
    FIRST_SPECIAL,
    GROUP,
    NORM_EPS,
    Decoder,
    Drafter,
    DrafterShape,
    Optimiser,
    Params,
    Target,
    TargetShape,
    init_drafter,
    init_target,
    int4_codes,
    linear,
    rms_norm,
)
from safetensors.torch import load_file, save_file
from tqdm import tqdm

START = time.perf_counter()
FILE_LIMIT = 15 * 2**20  # bytes of one checkpoint file


@dataclass(frozen=True)
class Plan:
    """Sizes, seeds, and the share of the wall time that has passed when each phase ends."""

    rows: int = 65536  # tokens of a step, in every phase: each function compiles once
    context: int = 512
    long_context: int = 2048
    packages_share: float = 0.75
    bias_rate: float = 0.003
    blocks: int = 8192  # draft blocks of a step
    position_decay: float = 4.0
    # Continuations: (texts, length, given tokens); the long ones exercise the sliding window.
    texts: tuple[tuple[int, int, int], ...] = ((8192, 512, 256), (49152, 256, 64))
    decode_rows: int = 16384
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.45), (0.7, 0.30), (1.0, 0.25))
    emit: int = 128  # tokens per held-out prompt
    sampling_seeds: int = 3
    validation_prompts: int = 256
    budgets: tuple[int, ...] = (8, 16, 32, 64)
    seed: int = 2026
    pretrain_end: float = 0.42
    finetune_end: float = 0.53
    texts_end: float = 0.66
    drafter_end: float = 0.94
    more_peak: float = 0.5  # of the learning rate, where trained weights are trained further


# More drafting. The engine's users sample: most texts are of T = 0.7, and all are new.
MORE = Plan(
    texts=((8192, 512, 256), (98304, 256, 64)),
    temperatures=((0.0, 0.3), (0.7, 0.5), (1.0, 0.2)),
    sampling_seeds=2,
    budgets=(16, 32),
    seed=2027,
    texts_end=0.3,
    drafter_end=0.86,
)
TOY_PLAN = Plan(
    rows=2048,
    blocks=32,
    texts=((8, 512, 256), (16, 256, 64)),
    decode_rows=16,
    emit=16,
    sampling_seeds=1,
    budgets=(8, 16),
)
TOY_MORE = dict(
    rows=1024, blocks=16, texts=((2, 512, 256), (4, 256, 64)), decode_rows=4, emit=16,
    sampling_seeds=1, validation_prompts=2,
)  # fmt: skip
TOY_TARGET = TargetShape(
    hidden=64,
    layers=3,
    heads=2,
    q_lora=32,
    kv_lora=32,
    nope=16,
    rope_dim=16,
    v_dim=16,
    dense_width=64,
    experts=4,
    active=2,
    expert_width=32,
    taps=(0, 1, 2),
)
TOY_DRAFTER = DrafterShape(layers=1, heads=2, kv_heads=1, head_dim=32, width=64)


class Clock:
    """The script's wall time as a fraction of its budget."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def now(self) -> float:
        return (time.perf_counter() - START) / self.seconds


def log(*words: object) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s]", *words, flush=True)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def decay(
    progress: float, start: float, floor: float, peak: float = 1.0, warm: float = 0.02
) -> float:
    """Learning-rate factor: a short warm-up, flat until `start`, then linear down to `floor`."""
    if progress < warm:
        return peak * progress / warm
    if progress < start:
        return peak
    return peak + (floor - peak) * (progress - start) / (1 - start)


def cosine(progress: float, peak: float, warm: float = 0.02) -> float:
    """Learning-rate factor: a short warm-up, then half a cosine down to 0."""
    if progress < warm:
        return peak * progress / warm
    return peak / 2 * (1 + math.cos(math.pi * min(1.0, (progress - warm) / (1 - warm))))


# ---- data ------------------------------------------------------------------------------------


def read_ids(path: Path, device: torch.device) -> torch.Tensor:
    with lzma.open(path) as handle:
        ids = np.frombuffer(handle.read(), np.uint16).astype(np.int32)
    return torch.from_numpy(ids).to(device)


def windows(ids: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`count` random passages [count, length], int64."""
    start = torch.randint(0, len(ids) - length, (count, 1), generator=generator, device=ids.device)
    return ids[start + torch.arange(length, device=ids.device)].long()


@dataclass(frozen=True)
class Corpus:
    stdlib: torch.Tensor
    packages: torch.Tensor
    seeds: torch.Tensor
    heldout: torch.Tensor
    token_bytes: torch.Tensor
    prompts: dict[str, np.ndarray]

    @staticmethod
    def read(folder: Path, device: torch.device) -> Corpus:
        names = ("train_stdlib", "train_packages", "seeds", "heldout")
        parts = [read_ids(folder / f"{name}.u16.xz", device) for name in names]
        sizes = torch.from_numpy(np.load(folder / "token_bytes.npy")).to(device)
        return Corpus(*parts, sizes, dict(np.load(folder / "heldout_prompts.npz")))

    def batch(self, plan: Plan, context: int, generator: torch.Generator) -> torch.Tensor:
        count = plan.rows // context
        packages = round(count * plan.packages_share)
        return torch.cat(
            [
                windows(self.packages, packages, context + 1, generator),
                windows(self.stdlib, count - packages, context + 1, generator),
            ]
        )


# ---- target ----------------------------------------------------------------------------------


def train_target(
    target: Target,
    optimiser: Optimiser,
    corpus: Corpus,
    plan: Plan,
    clock: Clock,
    *,
    name: str,
    context: int,
    quantise: bool,
    end: float,
    schedule: tuple[float, float, float],
) -> dict[str, object]:
    """Trains until `end` of the wall time; `schedule` is (start of the decay, floor, peak)."""
    generator = torch.Generator(device=target.device).manual_seed(plan.seed + quantise)
    decay_start, floor, peak = schedule
    biases = [p for n, p in target.params.items() if n.endswith("e_score_correction_bias")]

    def backward() -> tuple[torch.Tensor, torch.Tensor]:
        losses, load = target.losses(corpus.batch(plan, context, generator), quantise)
        loss = losses.mean()
        loss.backward()
        return loss.detach(), load

    backward()  # compiles; its gradient is dropped
    for p in target.params.values():
        p.grad = None
    synchronise()
    log(name, "compiled")
    begin, began, step, curve = clock.now(), time.perf_counter(), 0, []
    bar = tqdm(desc=name, unit="tok", unit_scale=True, disable=None)
    while (progress := (clock.now() - begin) / max(end - begin, 1e-9)) < 1 or step == 0:
        rate = decay(min(progress, 1), decay_start, floor, peak, 0.0 if quantise else 0.02)
        loss, load = backward()
        optimiser.step(rate, momentum=0.95 if quantise else 0.85 + 0.1 * min(1, step / 200))
        with torch.no_grad():  # push rows towards the experts that had too few
            push = torch.sign(load.mean(1, keepdim=True) - load) * plan.bias_rate * max(rate, 0.1)
            for bias, change in zip(biases, push, strict=True):
                bias += change
        if step % 100 == 0:
            crowd = float((load.max(1).values / load.mean(1)).max())
            curve.append((step, round(float(loss), 4)))
            log(name, f"step {step} loss {float(loss):.4f} busiest {crowd:.2f} rate {rate:.3f}")
        elif step % 8 == 0:
            synchronise()  # keeps the queue short, so that the clock is honest
        bar.update(plan.rows)
        step += 1
    synchronise()
    bar.close()
    seconds = time.perf_counter() - began
    speed = step * plan.rows / seconds
    log(name, f"{step} steps, {seconds:.0f} s, {speed:.0f} tok/s, loss {float(loss):.4f}")
    return {
        "steps": step,
        "seconds": round(seconds, 1),
        "tokens": step * plan.rows,
        "last_loss": round(float(loss), 4),
        "curve": curve,
    }


def bits_per_byte(target: Target, corpus: Corpus, plan: Plan, length: int, quantise: bool) -> float:
    """Windows of `length` that advance by half; all but the first score their second half only.

    The targets are text: predictions of the special ids between documents do not count.
    """
    ids, half, batch = corpus.heldout.long(), length // 2, plan.rows // length
    starts = torch.arange(0, len(ids) - length - 1, half, device=ids.device)
    nats = size = 0.0
    for i in range(0, len(starts), batch):
        at = starts[i : i + batch]
        padded = torch.cat([at, at[:1].expand(batch - len(at))])  # one shape: nothing recompiles
        x = ids[padded[:, None] + torch.arange(length + 1, device=ids.device)]
        losses = target.losses(x, quantise)[0].detach().view(batch, length)[: len(at)]
        labels = x[: len(at), 1:]
        scored = torch.zeros_like(losses)
        scored[:, half:] = 1
        if i == 0:
            scored[0] = 1
        scored *= labels < FIRST_SPECIAL
        nats += float((losses * scored).sum())
        size += float((corpus.token_bytes[labels] * scored).sum())
    return nats / math.log(2) / size


# ---- files -----------------------------------------------------------------------------------


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Codes -8..7 [out, in] to int32 [out, in / 8]: column c at bits 4 * (c mod 8)."""
    nibbles = (codes.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8, device=codes.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def published_target(params: Params) -> dict[str, torch.Tensor]:
    """The target's tensors as a checkpoint holds them: INT4 experts, F32 router bias, else BF16."""
    tensors = {}
    for name, p in params.items():
        name, p = f"language_model.{name}", p.detach().cpu()
        if ".experts." not in name:
            tensors[name] = p if name.endswith("correction_bias") else p.bfloat16()
            continue
        stem, matrix = name.rsplit(".", 1)
        for expert, weight in enumerate(p):
            codes, scale = int4_codes(weight)
            prefix = f"{stem}.{expert}.{matrix}."
            tensors[prefix + "weight_packed"] = pack_int4(codes.flatten(-2))
            tensors[prefix + "weight_scale"] = scale.squeeze(-1).bfloat16()
            tensors[prefix + "weight_shape"] = torch.tensor(weight.shape, dtype=torch.int32)
    return tensors


def save_target(params: Params, out: Path) -> None:
    """`target-N.safetensors`, each below FILE_LIMIT."""
    files: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in published_target(params).items():
        if size + tensor.nbytes > FILE_LIMIT:
            files.append({})
            size = 0
        files[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    for index, tensors in enumerate(files):
        save_file(tensors, out / f"target-{index}.safetensors")


def save_drafter(params: Params, out: Path) -> None:
    tensors = {n: p.detach().cpu().bfloat16().contiguous() for n, p in params.items()}
    save_file(tensors, out / "drafter.safetensors")


def unpack_int4(words: torch.Tensor) -> torch.Tensor:
    """What pack_int4 packed, as float32 codes."""
    shifts = 4 * torch.arange(8, device=words.device)
    return ((words[..., None] >> shifts & 15) - 8).flatten(-2).float()


def read_published(folder: Path, device: torch.device) -> Params:
    """The tensors of a published folder, float32; the routed experts dequantised and stacked."""
    tensors: Params = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(file)
    params: Params = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("language_model.")
        if ".experts." not in name:
            params[short] = tensor.float().to(device)
        elif name.endswith(".weight_packed"):
            stem, expert, matrix, _ = short.rsplit(".", 3)
            codes = unpack_int4(tensor).unflatten(-1, (-1, GROUP))
            scale = tensors[name.replace("packed", "scale")].float()
            experts.setdefault(f"{stem}.{matrix}", {})[int(expert)] = codes * scale[..., None]
    for name, parts in experts.items():
        params[name] = torch.stack([parts[i] for i in range(len(parts))]).flatten(-2).to(device)
    return params


# ---- drafter ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """Continuations by the target, with what the drafter reads and what it learns from."""

    ids: torch.Tensor  # [N, S]
    taps: torch.Tensor  # [N, S, taps * hidden]
    hidden: torch.Tensor  # [N, S, hidden], after the last norm
    temperature: torch.Tensor  # [N]
    given: int  # tokens of the prompt


def read_states(target: Target, ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(taps, hidden after the last norm) of ids [N, S], computed `rows` tokens at a time."""
    (count, length), shape = ids.shape, target.shape
    batch, norm = rows // length, target.params["model.norm.weight"].detach()
    like = {"dtype": target.dtype, "device": target.device}
    taps = torch.empty(count, length, len(shape.taps) * shape.hidden, **like)
    hidden = torch.empty(count, length, shape.hidden, **like)
    for i in range(0, count, batch):
        part = ids[i : i + batch]
        padded = torch.cat([part, part[:1].expand(batch - len(part), -1)])
        out = target.forward(padded, taps=True)
        joined = torch.cat(out.taps, -1).view(batch, length, -1)
        taps[i : i + batch] = joined[: len(part)]
        normed = rms_norm(out.hidden.detach(), norm, NORM_EPS).view(batch, length, -1)
        hidden[i : i + batch] = normed[: len(part)]
    return taps, hidden


def write_texts(target: Target, seeds: torch.Tensor, plan: Plan, clock: Clock) -> list[Texts]:
    """The INT4 target continues text it never saw, greedily and sampled."""
    generator = torch.Generator(device=target.device).manual_seed(plan.seed + 2)
    decoder = Decoder(target)
    values, shares = zip(*plan.temperatures, strict=True)
    choices = torch.tensor(values, device=target.device)
    weights = torch.tensor(shares, device=target.device)
    sets = []
    for count, length, given in plan.texts:
        ids, temperatures = [], []
        for _ in range(math.ceil(count / plan.decode_rows)):
            if ids and clock.now() > plan.texts_end:
                break
            size = min(count, plan.decode_rows)
            prompts = windows(seeds, size, length, generator)
            drawn = torch.multinomial(weights, size, replacement=True, generator=generator)
            temperature = choices[drawn]
            start = torch.full((size,), given, device=target.device)
            ids.append(decoder.continue_text(prompts, start, temperature, generator))
            temperatures.append(temperature)
            log(f"texts: {size} of length {length}, {size * (length - given)} fresh tokens")
        joined = torch.cat(ids)
        states = read_states(target, joined, plan.rows)
        sets.append(Texts(joined, *states, torch.cat(temperatures), given))
    return sets


def train_drafter(
    drafter: Drafter, sets: list[Texts], plan: Plan, clock: Clock, noisy: bool = False
) -> dict[str, object]:
    """Trains until plan.drafter_end of the wall time: `noisy` with the noise of the target's draws
    and a cosine, else towards the target's distribution (greedy texts: its tokens)."""
    d, device = drafter.shape, drafter.target.device
    generator = torch.Generator(device=device).manual_seed(plan.seed + 3)
    pick = np.random.default_rng(plan.seed + 3)
    fresh = np.array([len(t.ids) * (t.ids.shape[1] - t.given) for t in sets], float)
    optimiser = Optimiser(drafter.params, adam_rates={})
    ahead = torch.arange(1, d.block, device=device)
    by_position = torch.exp(-(ahead - 1) / plan.position_decay)

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        texts = sets[pick.choice(len(sets), p=fresh / fresh.sum())]
        count, length = texts.ids.shape
        batch = plan.rows // length
        roots_each = plan.blocks // batch
        row = torch.randint(0, count, (batch,), generator=generator, device=device)
        room = length - d.block - texts.given
        order = torch.rand(batch, room, generator=generator, device=device)
        roots = order.topk(roots_each, 1).indices + texts.given
        ids = texts.ids[row]
        hidden = drafter.forward(ids, texts.taps[row], roots)[:, :, 1:]
        at = (roots[:, :, None] + ahead).flatten(1)
        teacher = texts.hidden[row[:, None], at - 1].flatten(0, 1)
        temperature = texts.temperature[row]
        heat = temperature.repeat_interleave(roots_each * (d.block - 1))
        labels = ids.gather(1, at).flatten()
        given = hidden.flatten(0, 2), drafter.params["norm.weight"], drafter.head
        if noisy:
            noise = drafter.noise(teacher, drafter.head, heat, labels)
            loss, right = drafter.noisy_loss(*given, noise, heat, labels, by_position)
        else:
            weights = by_position.repeat(plan.blocks)
            loss, right = drafter.loss(*given, teacher, heat, labels, weights)
        return loss, right.view(batch, roots_each, d.block - 1), temperature

    step()[0].backward()
    for p in drafter.params.values():
        p.grad = None
    synchronise()
    log("drafter compiled")
    begin, began, done, curve = clock.now(), time.perf_counter(), 0, []
    bar = tqdm(desc="drafter", unit="block", unit_scale=True, disable=None)
    span = max(plan.drafter_end - begin, 1e-9)
    while (progress := (clock.now() - begin) / span) < 1 or done == 0:
        loss, right, temperature = step()
        loss.backward()
        rate = cosine(progress, plan.more_peak) if noisy else decay(min(progress, 1), 0.4, 0.02)
        optimiser.step(rate, momentum=0.85 + 0.1 * min(1, done / 200))
        if done % 250 == 0:
            greedy = right[temperature == 0].float().cumprod(-1).sum(-1).mean()
            curve.append((done, round(float(loss.detach()), 4), round(float(greedy), 3)))
            log(f"drafter step {done} loss, accepted greedily {curve[-1][1:]} rate {rate:.3f}")
        elif done % 8 == 0:
            synchronise()
        bar.update(plan.blocks)
        done += 1
    synchronise()
    bar.close()
    seconds = time.perf_counter() - began
    log(f"drafter {done} steps, {seconds:.0f} s, loss {float(loss.detach()):.4f}")
    return {
        "steps": done,
        "seconds": round(seconds, 1),
        "blocks": done * plan.blocks,
        "fresh_tokens": int(fresh.sum()),
        "last_loss": round(float(loss.detach()), 4),
        "curve": curve,
    }


# ---- acceptance ------------------------------------------------------------------------------


def tree_accepts(log_p: torch.Tensor, labels: torch.Tensor, budget: int) -> torch.Tensor:
    """How many of `labels` [R, depth] a best-first tree of `budget` nodes holds, root included.

    log_p [R, depth, vocab]. The drafter's argmax path is in the tree first; the other places go to
    the nodes with the largest sums of log-probabilities.
    """
    rows, depth, _ = log_p.shape
    width = budget - 1
    top = log_p.topk(width, -1).values
    level = top[:, 0]
    levels = [level]
    for k in range(1, depth):
        level = (level[:, :, None] + top[:, k, None, :]).flatten(1).topk(width, -1).values
        levels.append(level)
    on_path = (log_p.argmax(-1) == labels).long().cumprod(-1).bool()
    spare = width - depth
    if spare <= 0:
        return on_path[:, :width].sum(-1)
    others = torch.cat([scores[:, 1:] for scores in levels], -1)  # the first is the argmax path
    threshold = others.topk(spare, -1).values[:, -1:]
    of_label = log_p.gather(2, labels[:, :, None])[:, :, 0]
    score, scores = of_label[:, 0], [of_label[:, 0]]
    for k in range(1, depth):
        score = score + of_label[:, k]
        scores.append(score)
    held = on_path | (torch.stack(scores, -1) >= threshold)
    return held.long().cumprod(-1).sum(-1)


def loops(tokens: list[int]) -> bool:
    """Whether the last 48 tokens repeat with a period of at most 24."""
    tail = tokens[-48:]
    return any(all(tail[i] == tail[i - p] for i in range(p, len(tail))) for p in range(1, 25))


def accepted_everywhere(
    drafter: Drafter,
    ids: torch.Tensor,
    first: torch.Tensor,
    plan: Plan,
    temperature: float = 0.0,
) -> dict[int, np.ndarray]:
    """Accepted drafts for every root first[i] … first[i] + emit - 1 of known texts ids [M, S].

    At a temperature, drafts are ranked as the engine does: by logits + temperature * noise, with
    noise that makes the target draw the text. At 0 by the drafter's logits alone.
    Returns budget -> [M, emit]; budget 0 stands for the chain.
    """
    d = drafter.shape
    count, length = ids.shape
    batch = plan.rows // length
    roots_each = plan.blocks // batch
    taps, states = read_states(drafter.target, ids, plan.rows)
    norm = drafter.params["norm.weight"].detach()
    ahead = torch.arange(1, d.block, device=ids.device)
    found = {b: np.zeros((count, plan.emit), np.int64) for b in (0, *plan.budgets)}
    for i in range(0, count, batch):
        rows = torch.arange(i, i + batch, device=ids.device).clamp_max(count - 1)
        for offset in range(0, plan.emit, roots_each):
            steps = torch.arange(offset, offset + roots_each, device=ids.device)
            roots = first[rows][:, None] + steps.clamp_max(plan.emit - 1)
            hidden = drafter.forward(ids[rows], taps[rows], roots)[:, :, 1:].detach()
            at = (roots[:, :, None] + ahead).flatten(1)
            labels = ids[rows].gather(1, at)
            hidden = rms_norm(hidden.flatten(0, 1), norm, NORM_EPS)
            logits = linear(hidden, drafter.head).float()
            if temperature:
                teacher = states[rows[:, None], at - 1].flatten(0, 1)
                heat = torch.full((len(teacher),), temperature, device=ids.device)
                noise = drafter.noise(teacher, drafter.head, heat, labels.flatten())
                logits += temperature * noise.view_as(logits)
            log_p = torch.log_softmax(logits[..., :FIRST_SPECIAL], -1)
            labels = labels.view(-1, d.block - 1)
            keep = min(batch, count - i)
            upto = min(plan.emit, offset + roots_each)
            for budget in found:
                held = tree_accepts(log_p, labels, budget or d.block)
                held = held.view(batch, roots_each)[:keep, : upto - offset]
                found[budget][i : i + keep, offset:upto] = held.cpu().numpy()
    return found


def walk(accepted: np.ndarray) -> tuple[int, int]:
    """(tokens emitted, verify steps) along one text: a step emits its drafts and a bonus."""
    position = steps = 0
    while position < len(accepted):
        position += int(accepted[position]) + 1
        steps += 1
    return position, steps


def acceptance(
    drafter: Drafter,
    decoder: Decoder,
    prompts: list[np.ndarray],
    temperature: float,
    plan: Plan,
    length: int,
    noisy: bool = False,
) -> dict[str, object]:
    """Acceptance lengths on the target's own continuations of prompts; `noisy`: drafts are ranked
    with the target's noise, as in the engine."""
    device, block = drafter.target.device, drafter.shape.block
    seeds = plan.sampling_seeds if temperature else 1
    given = torch.tensor([len(p) for p in prompts] * seeds, device=device)
    ids = torch.zeros(len(given), length, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts * seeds):
        ids[row, : len(prompt)] = torch.from_numpy(prompt).to(device)
    generator = torch.Generator(device=device).manual_seed(plan.seed + 4)
    upto = int(given.max()) + plan.emit + block
    heat = torch.full((len(given),), temperature, device=device)
    ids[:, :upto] = decoder.continue_text(ids[:, :upto], given, heat, generator)
    emitted = [ids[r, g : g + plan.emit].tolist() for r, g in enumerate(given.tolist())]
    looping = np.array([loops(tokens) for tokens in emitted])
    result: dict[str, object] = {"texts": len(given), "looping": round(float(looping.mean()), 3)}
    for budget, accepted in accepted_everywhere(
        drafter, ids, given, plan, temperature if noisy else 0.0
    ).items():
        walks = np.array([walk(row) for row in accepted])
        key = f"tree {budget}" if budget else "chain"
        result[key] = round(float(walks[:, 0].sum() / walks[:, 1].sum()), 3)
        straight = walks[~looping]
        if len(straight):
            tau = float(straight[:, 0].sum() / straight[:, 1].sum())
            result[f"{key} without loops"] = round(tau, 3)
    return result


# ---- more drafting ---------------------------------------------------------------------------


def draft_more(
    published: Path, data: Path, plan: Plan, clock: Clock, device: torch.device, out: Path
) -> None:
    """Trains the published drafter further; the target stays as it is.

    The prompts to validate with are of the target's training text, with which no text of the
    drafter's began.
    """
    compiled, shape, drafter_shape = device.type == "cuda", TargetShape(), DrafterShape()
    seeds = read_ids(data / "seeds.u16.xz", device)
    known = read_ids(data / "train_stdlib.u16.xz", device).cpu().numpy()
    target = Target(shape, read_published(published, device), compiled)
    params = read_published(published / "drafter", device)
    for p in params.values():
        p.requires_grad_()
    drafter, decoder = Drafter(target, drafter_shape, params, compiled), Decoder(target)
    pick = np.random.default_rng(plan.seed)
    lengths = pick.integers(100, 200, plan.validation_prompts)
    starts = pick.integers(0, len(known) - 200, plan.validation_prompts)
    prompts = [known[s : s + n] for s, n in zip(starts, lengths, strict=True)]
    results: dict[str, object] = {"plan": asdict(plan), "torch": torch.__version__}
    results |= {"seed tokens": len(seeds), "validation text tokens": len(known)}

    def measure(name: str) -> None:
        for temperature in (0.0, 0.7, 1.0):
            which = drafter, decoder, prompts, temperature, plan, plan.context
            found = acceptance(*which, noisy=True)
            results[f"{name}, T = {temperature}"] = found
            log(f"{name}, T = {temperature}", found)
        (out / "drafting.json").write_text(json.dumps(results, indent=1) + "\n")

    log(f"{len(seeds)} tokens of seeds, {len(known)} to validate with")
    measure("before")
    sets = write_texts(target, seeds, plan, clock)
    results["drafting"] = train_drafter(drafter, sets, plan, clock, noisy=True)
    save_drafter(params, out)
    del sets
    measure("after")


# ---- command line ----------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="what tools/nano_data.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=510, help="wall time of the whole run")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--more-drafting", type=Path, metavar="PUBLISHED", help="see above")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compiled = device.type == "cuda"
    plan, shape, drafter_shape = Plan(), TargetShape(), DrafterShape()
    if args.toy:
        plan, shape, drafter_shape = TOY_PLAN, TOY_TARGET, TOY_DRAFTER
    clock = Clock(args.seconds)
    if args.more_drafting:
        plan = replace(MORE, **TOY_MORE) if args.toy else MORE
        draft_more(args.more_drafting, args.data, plan, clock, device, args.out)
        return
    results: dict[str, object] = {
        "plan": asdict(plan),
        "target": asdict(shape),
        "drafter": asdict(drafter_shape),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if compiled else "cpu",
    }

    def record(name: str, value: object) -> None:
        results[name] = value
        results["seconds"] = round(time.perf_counter() - START, 1)
        (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")

    corpus = Corpus.read(args.data, device)
    log("data read")
    target = Target(shape, init_target(shape, plan.seed, device), compiled)
    optimiser = Optimiser(
        target.params, {"embed_tokens": 0.01, "lm_head": 0.004, "mlp.gate.weight": 0.004}
    )

    def both_lengths(which: Target, quantise: bool) -> dict[str, float]:
        lengths = (plan.context, plan.long_context)
        return {str(n): round(bits_per_byte(which, corpus, plan, n, quantise), 4) for n in lengths}

    record(
        "pretrain",
        train_target(
            target,
            optimiser,
            corpus,
            plan,
            clock,
            name="pretrain",
            context=plan.context,
            quantise=False,
            end=plan.pretrain_end,
            schedule=(0.45, 0.25, 1.0),
        ),
    )
    record("bits per byte, bf16 before fine-tuning", both_lengths(target, False))
    record(
        "finetune",
        train_target(
            target,
            optimiser,
            corpus,
            plan,
            clock,
            name="finetune",
            context=plan.long_context,
            quantise=True,
            end=plan.finetune_end,
            schedule=(0.1, 0.01, 0.25),
        ),
    )
    save_target(target.params, args.out)
    record("bits per byte, bf16", both_lengths(target, False))
    int4 = target.frozen_int4()
    record("bits per byte, INT4", both_lengths(int4, False))
    log({k: v for k, v in results.items() if k.startswith("bits")})
    del optimiser, target

    sets = write_texts(int4, corpus.seeds, plan, clock)
    params = init_drafter(shape, drafter_shape, plan.seed + 1, device)
    drafter = Drafter(int4, drafter_shape, params, compiled)
    record("drafting", train_drafter(drafter, sets, plan, clock))
    save_drafter(drafter.params, args.out)
    del sets

    decoder = Decoder(int4)
    short = [p for name, p in corpus.prompts.items() if name.startswith("short")]
    long = [p for name, p in corpus.prompts.items() if name.startswith("long")]
    for temperature in (0.0, 0.7, 1.0):
        what = acceptance(drafter, decoder, short, temperature, plan, plan.context)
        record(f"acceptance, T = {temperature}", what)
        log(f"T = {temperature}", what)
    what = acceptance(drafter, decoder, long, 0.0, plan, plan.long_context)
    record("acceptance, 900-token prompts, T = 0", what)
    log("900 tokens", what)


if __name__ == "__main__":
    main()
