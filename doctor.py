"""First contact: `--doctor` says in one page whether this machine can run this checkpoint.

Machine, GPUs, the whole load plan, a sample of tensors, the chat encoding, every operation at the
model's own shapes, disk and link rates, then a short text. What cannot be looked at is skipped with
a reason; what is wrong says what to do. The exit code is 0 only where the model ran.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import config
import loader
import parallel
from config import UserError
from engine import Engine
from reference import Int4Weight, ReferenceOps, free_memory, unpack_int4
from sampling import SamplingParams

GIB = 2**30
# A user turn "hello" in instant mode, as the published vocabulary and template encode it.
KNOWN_VOCABULARY = 163840
KNOWN = [163587, 2482, 163601, 22931, 163586, 163588, 69702, 163601, 163606, 163607]
SAMPLE_ROWS = 64
DISK_BYTES = 2 << 30  # read at most, to time it
LINK_BYTES = 256 << 20
OP_ROWS = 2
OP_COLUMNS = 512  # outputs of a large matrix that are looked at: each is a sum of its own
OP_WEIGHTS = 60_000_000  # numbers in a stack of experts
TOKENS = 8


@dataclass(frozen=True)
class Finding:
    """mark: ok, skip or FAIL."""

    mark: str
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.mark:<4}  {self.what:<10}  {self.text}"


def run(settings: config.Config, device: str) -> int:
    """Print the page; 0 where the model is fit to run here, else 1. A model that is too large for
    this machine is said, and nothing to mend unless a device was asked for by name."""
    seat = parallel.seat(os.environ)
    if seat is not None and seat.rank:  # under a launcher rank 0 looks, the others follow it
        Engine(settings, device, load=False)
    doctor, failed = Doctor(settings, device), 0
    for what, look in doctor.looks().items():
        try:
            for mark, text in look():
                failed += mark == "FAIL"
                print(Finding(mark, what, text), flush=True)
        except UserError as error:
            failed += 1
            print(Finding("FAIL", what, str(error)), flush=True)
    fit = doctor.ran and not failed
    if failed:
        print(f"{failed} of these must be mended", flush=True)
    else:
        print("fit to run" if fit else "nothing to mend, but not fit to run here", flush=True)
    return 0 if fit else 1


Looks = Iterator[tuple[str, str]]  # mark, text


class Doctor:
    """What has been found out so far; a look that needs what an earlier one did not find skips."""

    def __init__(self, settings: config.Config, device: str):
        self.settings, self.device = settings, device
        self.checkpoint: loader.Checkpoint | None = None
        self.draft_checkpoint: loader.Checkpoint | None = None
        self.engine: Engine | None = None
        self.cupy = None
        self.fits = self.ran = False

    def looks(self) -> dict[str, Callable[[], Looks]]:
        return {
            "machine": self.machine,
            "gpus": self.gpus,
            "files": self.files,
            "plan": self.plan,
            "memory": self.memory,
            "tensors": self.tensors,
            "chat": self.chat,
            "operations": self.operations,
            "disk": self.disk,
            "links": self.links,
            "text": self.text,
        }

    # -- the machine

    def machine(self) -> Looks:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
        free = free_memory() / GIB
        yield (
            "ok",
            f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs,"
            f" {total:.1f} GiB of memory, {free:.1f} free; Python {platform.python_version()},"
            f" NumPy {np.__version__}",
        )

    def gpus(self) -> Looks:
        if self.device in ("cpu", "emulate"):
            yield "skip", f"--device {self.device} was asked for"
            return
        from launchers import CudaLauncher

        try:
            CudaLauncher()
        except UserError as error:
            if self.device == "cuda":
                raise
            reason = str(error).removeprefix("--device cuda: ").partition(";")[0]
            yield "skip", f"{reason}; what follows looks at the CPU"
            return
        import cupy

        self.cupy, runtime = cupy, cupy.cuda.runtime
        count, tp = runtime.getDeviceCount(), self.settings.tp
        yield (
            "ok",
            f"driver for CUDA {_version(runtime.driverGetVersion())}, runtime"
            f" {_version(runtime.runtimeGetVersion())}, CuPy {cupy.__version__}",
        )
        for i in range(count):
            with cupy.cuda.Device(i) as gpu:
                name = runtime.getDeviceProperties(i)["name"].decode()
                free, total = runtime.memGetInfo()
                yield (
                    "ok",
                    f"{i}: {name}, sm_{gpu.compute_capability}, {free / GIB:.1f} of"
                    f" {total / GIB:.1f} GiB free",
                )
        need = 1 if tp.only_rank is not None else tp.size
        if count < need:
            yield "FAIL", f"tp.size {tp.size} needs as many GPUs, {count} are here; lower --tp"

    # -- the checkpoint

    def files(self) -> Looks:
        model, draft = self.settings.model, self.settings.draft
        tp, began = self.settings.tp, time.perf_counter()
        where = dict(generate=model.load == "generate", rank=tp.only_rank or 0, size=tp.size)
        self.checkpoint = c = loader.open_checkpoint(model.path, **where)
        if draft.path is not None:
            self.draft_checkpoint = loader.open_checkpoint(draft.path, **where)
        took = time.perf_counter() - began
        if c.generated:
            yield "ok", f"{c.directory}: weights from seed {model.seed}, no files are read"
            return
        shards = {tensor.file for tensor in c.tensors.values()}
        size = sum(tensor.end - tensor.begin for tensor in c.tensors.values())
        draft_text = ""
        if self.draft_checkpoint is not None:
            draft_text = f"; drafter: {len(self.draft_checkpoint.tensors)} tensors"
        yield (
            "ok",
            f"{len(c.tensors)} tensors in {len(shards)} shards, {size / 1e9:.2f} GB,"
            f" {c.skipped_vision} of vision skipped{draft_text}; headers read in {took:.1f} s",
        )

    def plan(self) -> Looks:
        if self.checkpoint is None:
            yield "skip", "mend the files first"
            return
        tp, began, sizes, draft_sizes = self.settings.tp, time.perf_counter(), [], []
        self.engine = engine = Engine(self.settings, self.device, load=False)
        # A cut checkpoint has one rank's parts; elsewhere every rank's plan is checked.
        alone = tp.only_rank is not None or self.checkpoint.shard is not None
        for rank in [engine.rank] if alone else range(tp.size):
            plan = loader.plan_target(self.checkpoint, engine.dims, tp=tp, rank=rank)
            sizes.append(plan.bytes)
            if self.draft_checkpoint is not None:
                plan = loader.plan_drafter(
                    self.draft_checkpoint, engine.draft_dims, engine.dims, tp=tp, rank=rank
                )
                draft_sizes.append(plan.bytes)
        took = time.perf_counter() - began
        parts = [_range(sizes)] + ([f"drafter {_range(draft_sizes)}"] if draft_sizes else [])
        who = f"rank {engine.rank} of {tp.size}" if alone and tp.size > 1 else f"{tp.size} rank(s)"
        found = "each tensor is there, of the right type and shape"
        if self.checkpoint.generated:
            found = "each tensor will be made"
        yield (
            "ok",
            f"{who}: {found}; GiB a rank: {', '.join(parts)}; {took:.1f} s",
        )

    def memory(self) -> Looks:
        if self.engine is None:
            yield "skip", "no plan"
            return
        engine = self.engine
        on_cpu = isinstance(engine.ops, ReferenceOps)
        if on_cpu:
            alone = self.settings.tp.only_rank is not None
            need = {"weights": engine.host_bytes() * (1 if alone else self.settings.tp.size)}
            free = free_memory()
        else:
            need, free = engine.forecast(), engine.ops.launcher.free_bytes()
        total = sum(need.values())
        self.fits = total <= free
        parts = ", ".join(f"{what} {n / GIB:.2f}" for what, n in need.items())
        text = f"{total / GIB:.2f} GiB are needed ({parts}), {free / GIB:.2f} are free"
        if self.fits:
            yield "ok", text
        elif on_cpu:  # more ranks on the same host take no less
            mark = "skip" if self.device == "auto" else "FAIL"
            yield mark, f"{text}: this CPU cannot hold it, use a machine with GPUs"
        else:
            yield "FAIL", f"{text}; use more ranks (--tp), lower decode.context or decode.batch"

    def tensors(self) -> Looks:
        if self.engine is None or self.checkpoint.generated:
            yield "skip", "weights come from a seed" if self.engine else "no plan"
            return
        plan = self.engine.plan
        kinds = {layer.kind: i for i, layer in reversed([*enumerate(self.engine.dims.layers)])}
        layers = {kind: plan.weights.layers[i] for kind, i in kinds.items()}
        chosen = [plan.weights.embed, plan.weights.head, next(iter(layers.values())).q_b]
        if "moe" in layers:
            mlp = layers["moe"].mlp
            chosen += [mlp.router, mlp.bias, mlp.experts_gate, mlp.experts_down]
        for node in chosen:
            yield self.summary(plan, node)

    def summary(self, plan: loader.Plan, node) -> tuple[str, str]:
        """One tensor's first rows, INT4 unpacked."""

        def read(slot: loader.Slot) -> np.ndarray:
            return loader.read_piece(plan, slot, slot.pieces[0], SAMPLE_ROWS)

        if not isinstance(node, loader.Int4Slots):
            values, extra = read(node).astype(np.float32), ""
            name = node.pieces[0].tensor.name
        else:
            weight = Int4Weight(read(node.packed), read(node.scales))
            codes, scales = unpack_int4(weight.packed), weight.scales.astype(np.float32)
            name = node.packed.pieces[0].tensor.name
            extra = f"; codes {codes.min()}..{codes.max()}, {len(np.unique(codes))} of 16 used"
            values = codes * np.repeat(scales, weight.group_size, axis=-1)
        if not np.isfinite(values).all():
            return "FAIL", f"{name}: holds NaN or infinity; download this shard again"
        if not values.any():
            return "FAIL", f"{name}: its first rows are all zero; download this shard again"
        return (
            "ok",
            f"{name}: mean {values.mean():.2g}, deviation {values.std():.3g},"
            f" {values.min():.3g}..{values.max():.3g}{extra}",
        )

    def chat(self) -> Looks:
        if self.engine is None or self.engine.tokenizer is None:
            yield "skip", "the checkpoint has no tiktoken.model" if self.engine else "no plan"
            return
        ids = self.engine.encode_chat([{"role": "user", "content": "hello"}], thinking=False)
        if self.engine.dims.vocab_size != KNOWN_VOCABULARY:
            yield "skip", f"no known encoding for this vocabulary; a turn `hello` is {ids}"
        elif ids == KNOWN:
            yield "ok", f"a turn `hello` is {ids}, as published"
        else:
            yield (
                "FAIL",
                f"a turn `hello` is {ids}, expected {KNOWN}; download tiktoken.model,"
                " tokenizer_config.json and chat_template.jinja again",
            )

    # -- the operations

    def operations(self) -> Looks:
        if self.engine is None:
            yield "skip", "no plan"
            return
        from tests import op_cases  # the tests' own cases and bounds, at other shapes

        ops = self.engine.ops
        backend, worst, shown, wrong = op_cases.Backend(ops), 0.0, 0, 0
        for name, case, shape in op_shapes(self.engine, op_cases):
            shown += 1
            try:
                ratio = _ratio(case(backend, op_cases.Draw(backend), *shape))
                how = f"off by {ratio:.3g} of its bound"
            except AssertionError as error:  # bits that should be those of another operation
                expected = str(error).partition("\n")[0]
                ratio, how = math.inf, f"other bits than expected ({expected})"
            if ratio <= 1:
                worst = max(worst, ratio)
                continue
            wrong += 1
            yield "FAIL", f"{name} {shape}: {how}; run --check, then report it with this page"
        if not isinstance(ops, ReferenceOps):  # choice, trees and cache entries: exact
            exact = op_cases.Backend(type(ops)("float32", launcher=ops.launcher))
            for case, shape in op_cases.ROUTER + op_cases.DECODING:
                shown += 1
                try:
                    op_cases.check_exact(exact, case, shape)
                except AssertionError:
                    wrong += 1
                    name = op_cases.name_of(case, shape)
                    yield "FAIL", f"{name}: differs from its twin; run --check, then report it"
        if not wrong:
            yield (
                "ok",
                f"{shown} operations, sums at this rank's shapes on {ops.name}, {ops.activation}:"
                f" within {worst:.2f} of their error bounds against float64",
            )

    # -- rates

    def disk(self) -> Looks:
        if self.checkpoint is None or self.checkpoint.generated:
            yield "skip", "no files are read"
            return
        rate = loader.read_rate(self.checkpoint, DISK_BYTES)
        size = sum(tensor.end - tensor.begin for tensor in self.checkpoint.tensors.values())
        yield (
            "ok",
            f"{rate.gb_per_s:.2f} GB/s ({rate.bytes / 1e9:.2f} GB, {loader.READERS} threads): at"
            f" least {size / rate.gb_per_s / 1e9:.0f} s to read all",
        )

    def links(self) -> Looks:
        if self.cupy is None:
            yield "skip", "no GPU"
            return
        cupy = self.cupy
        memory = cupy.cuda.alloc_pinned_memory(LINK_BYTES)
        host = np.frombuffer(memory, np.uint8, LINK_BYTES)
        host[:] = 1
        arrays = []
        for i in range(cupy.cuda.runtime.getDeviceCount()):
            with cupy.cuda.Device(i):
                arrays.append(cupy.empty(LINK_BYTES, cupy.uint8))
                arrays[i].set(host)
                rate = self.timed(lambda to=arrays[i]: to.set(host))
                yield "ok", f"host to GPU {i}: {rate:.1f} GB/s"
        for i in range(1, len(arrays)):
            with cupy.cuda.Device(i):
                cupy.copyto(arrays[i], arrays[0])
                rate = self.timed(lambda to=arrays[i]: cupy.copyto(to, arrays[0]))
                yield "ok", f"GPU 0 to GPU {i}: {rate:.1f} GB/s"

    def timed(self, copy: Callable[[], None]) -> float:
        """GB/s of a copy of LINK_BYTES on the current device."""
        stream = self.cupy.cuda.get_current_stream()
        stream.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            copy()
        stream.synchronize()
        return 4 * LINK_BYTES / (time.perf_counter() - began) / 1e9

    # -- a short text

    def text(self) -> Looks:
        if self.engine is None or not self.fits:
            yield "skip", "the model does not fit here" if self.engine else "no plan"
            return
        engine, began = self.engine, time.perf_counter()
        free = None if self.cupy is None else engine.ops.launcher.free_bytes()
        engine.load()
        took = time.perf_counter() - began
        prompt: str | list[int] = [1, 2, 3]
        if engine.tokenizer is not None:
            prompt = engine.encode("hello")
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        runs = {}
        for mode in ("ar", "tree") if engine.drafter is not None else ("ar",):
            engine.use(mode, self.settings.draft.budget)
            [runs[mode]] = engine.generate([prompt], params, keep_logits=True)
        plain = runs["ar"]
        used = ""
        if free is not None:
            now = engine.ops.launcher.free_bytes()
            need = engine.forecast()
            forecast = sum(need.values()) - need["loading"]  # that is given back
            used = f"; {(free - now) / GIB:.2f} GiB in use, {forecast / GIB:.2f} were forecast"
        engine.close()
        if any(r.error for r in runs.values()):
            said = next(r.error for r in runs.values() if r.error)
            yield "FAIL", f"{said}; if the tensors above are right, report it with this page"
            return
        if "tree" in runs and not _same(plain, runs["tree"]):
            yield "FAIL", "tree and plain decoding differ; run --check, then report it"
            return
        said = repr(plain.text) if engine.tokenizer else str(plain.token_ids)
        modes = ", ".join(f"{mode} {r.tok_per_s:.1f} tok/s" for mode, r in runs.items())
        self.ran = True
        equal = ", equal bits" if len(runs) > 1 else ""
        yield "ok", f"loaded in {took:.1f} s; {said}; {modes}{equal}{used}"


def _ratio(outcome) -> float:
    """The largest error of an op_cases.Outcome, of its bound."""
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.abs(outcome.result - outcome.expected)
        return float(np.where(error == 0, 0.0, error / outcome.bound).max())


def _same(a, b) -> bool:
    return a.token_ids == b.token_ids and a.logits.tobytes() == b.logits.tobytes()


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _range(sizes: list[int]) -> str:
    low, high = min(sizes) / GIB, max(sizes) / GIB
    return f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}"


Shapes = Iterator[tuple[str, Callable, tuple]]  # name, case, shape
KIND = "bf16"  # of dense weights


def op_shapes(engine: Engine, cases) -> Shapes:
    """Every operation, at the shapes of this engine's rank and few rows."""
    m, d, tp, decode = engine.dims, engine.draft_dims, engine.settings.tp, engine.settings.decode
    hidden, rows = m.hidden_size, OP_ROWS
    vocabulary = min(-(-m.vocab_size // 8) * 8 // tp.ranks("lm_head"), 4096)
    yield "embed", cases.embed, (KIND, rows, vocabulary, hidden, 0)
    yield "rms_norm", cases.rms_norm, (False, rows, hidden)
    lengths = (min(decode.leaf + 6, decode.context - 2), 1)
    yield from _attention_shapes(m, tp, decode, lengths, cases)
    yield "add_rms_norm", cases.add_rms_norm, (rows, hidden, None)
    for i in {layer.kind: i for i, layer in reversed([*enumerate(m.layers)])}.values():
        yield from _mlp_shapes(m, tp, i, cases)
    yield _product(cases, "head", OP_COLUMNS, hidden)
    if d is not None:
        yield from _drafter_shapes(m, d, tp, decode, lengths, cases)


def _product(cases, name: str, out: int, k: int, leaves: int = 1) -> tuple[str, Callable, tuple]:
    return name, cases.linear, (KIND, OP_ROWS, min(out, OP_COLUMNS), k, leaves)


def _attention_shapes(m: config.Model, tp, decode, lengths, cases) -> Shapes:
    """lengths: of two sequences, the first in two leaves."""
    hidden, rows, size = m.hidden_size, OP_ROWS, tp.ranks("o_proj")
    heads, nope, rope = m.num_attention_heads // size, m.qk_nope_head_dim, m.qk_rope_head_dim
    value, latent = m.v_head_dim, m.kv_lora_rank
    few = min(heads, 2)  # heads are alike
    yield _product(cases, "q_a", m.q_lora_rank, hidden)
    yield "rms_norm of q_a", cases.rms_norm, (True, rows, m.q_lora_rank)
    yield _product(cases, "kv_a", latent + rope, hidden)
    yield "latent_entry", cases.latent_entry, (rows, latent, rope)
    inputs = (KIND, KIND), rows, hidden, m.q_lora_rank, latent, rope
    yield "latent_inputs", cases.latent_inputs, inputs
    yield _product(cases, "q_b", heads * (nope + rope), m.q_lora_rank)
    yield "latent_query", cases.latent_query, (KIND, rows, few, nope, rope, value, latent)
    shape = rows, hidden, few, m.q_lora_rank, latent, nope, rope, value
    yield "latent_queries", cases.latent_queries, shape
    shape = (min(heads, 8), latent, rope, decode.leaf, decode.span, lengths, 2)
    yield "latent_attention", cases.latent_attention, shape
    yield "absorb_v", cases.absorb_v, (KIND, rows, few, nope, value, latent)
    o_leaves = config.leaves(m.num_attention_heads, m.num_attention_heads) // size
    yield _product(cases, "o_proj", hidden, heads * value, o_leaves)


def _mlp_shapes(m: config.Model, tp, layer: int, cases) -> Shapes:
    hidden, rows, size = m.hidden_size, OP_ROWS, tp.ranks("down_proj")
    leaves = config.mlp_leaves(m, layer) // size
    if m.layers[layer].kind == "dense":
        how = "int4" if m.layers[layer].quantization == "int4" else KIND
        width = m.intermediate_size // size
        if 3 * width * hidden > OP_WEIGHTS:  # a part of every leaf
            width = OP_WEIGHTS // (3 * hidden) // (leaves * 32) * leaves * 32
        yield "mlp", cases.mlp, (how, rows, hidden, width, leaves)
        return
    how = "int4" if m.layers[layer].experts == "int4" else KIND
    width = m.moe_intermediate_size // size
    most = max(2, OP_WEIGHTS // (3 * width * hidden))
    experts, top_k = min(m.n_routed_experts, most), min(m.num_experts_per_tok, most)
    shape = (how, rows, hidden, width, experts, top_k, leaves, m.n_shared_experts * width)
    yield "moe", cases.moe, shape
    yield _product(cases, "router", m.n_routed_experts, hidden)


def _drafter_shapes(m: config.Model, d: config.Drafter, tp, decode, lengths, cases) -> Shapes:
    size, rows = tp.ranks("o_proj"), OP_ROWS
    heads, kv_heads = d.num_attention_heads // size, max(1, d.num_key_value_heads // size)
    yield _product(cases, "drafter fc", d.hidden_size, len(d.target_layer_ids) * m.hidden_size)
    few = min(heads, 8), min(kv_heads, 2), d.head_dim
    yield "block_inputs", cases.block_inputs, ((KIND, KIND), rows, d.hidden_size, *few)
    yield "put_context", cases.put_context, (KIND, rows, d.hidden_size, 2, *few[1:])
    shape = (
        heads, kv_heads, d.head_dim, decode.leaf, decode.span, lengths[:1], d.block_size,
        d.sliding_window or 0,
    )  # fmt: skip
    yield "block_attention", cases.block_attention, shape
