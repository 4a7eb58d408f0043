"""What a device may do to its user: no driver, an old one, too little memory, a kernel that fails,
a kernel that does not fit, a cache of compiled code that is old or shared (cases I1, I5)."""

from __future__ import annotations

import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import config
import engine
import launchers
import ops
import ops_mma
from config import UserError
from sampling import SamplingParams
from tests import toy
from tests.conftest import launcher

ROOT = Path(__file__).resolve().parent.parent
KERNELS = pytest.mark.parametrize(
    "device", ("emulate", pytest.param("cuda", marks=pytest.mark.gpu)), indirect=True
)
SMALL = 101_376  # shared bytes that a block may have on sm_120


# ---- before anything is loaded -----------------------------------------------------------------


@pytest.mark.parametrize(
    "driver, said",
    [
        (0, "no NVIDIA GPU was found (there is no driver); use --device cpu"),
        (12080, "the NVIDIA driver is too old: it runs CUDA 12.8, this CuPy needs 13.0; update"),
        (13000, "the NVIDIA driver cannot be used: broken; use --device cpu"),
    ],
)
def test_a_driver_that_does_not_do(monkeypatch, driver: int, said: str) -> None:
    class CUDARuntimeError(RuntimeError):
        pass

    def count():
        raise CUDARuntimeError("broken")

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=count,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 13000,
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(UserError) as caught:
        launchers.CudaLauncher()
    assert str(caught.value).startswith(f"--device cuda: {said}")


def engine_on(device: str, directory: Path, monkeypatch, made=None, **settings) -> engine.Engine:
    made = made or ops.CudaOps(launcher=launcher(device))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "make_ops", lambda *_: made)
        return toy.engine_of(directory, drafter=True, **settings)


@KERNELS
def test_memory_is_forecast_before_weights_are_read(device, tmp_path, monkeypatch) -> None:
    """What needs how much, and what to lower: here the weights, then a long cache."""
    directory = toy.write_checkpoint(tmp_path / "toy", drafter={})
    monkeypatch.setattr(type(launcher(device)), "free_bytes", lambda _: 1000)
    monkeypatch.setattr(engine.loader, "stream_target", None)  # not called
    for settings, advice in (
        ({"batch": 1, "prefill_chunk": 16}, "use more ranks (tp.size)"),
        ({"pages": 10**6}, "lower decode.context, decode.batch or decode.pages"),
        ({"prefill_chunk": 4096}, "decode.prefill_chunk or draft.budget"),
    ):
        with pytest.raises(UserError) as caught:
            engine_on(device, directory, monkeypatch, **settings)
        assert "0.00 GiB of memory are free" in str(caught.value), settings
        assert all(
            f"{what} " in str(caught.value) for what in ("weights", "cache", "scratch", "loading")
        )
        assert str(caught.value).endswith(advice), (settings, caught.value)


@pytest.mark.parametrize("device", ("emulate",), indirect=True)
@pytest.mark.parametrize(
    "rows, prompts, most", ((384, 1, ops.PARTS_BYTES), (384, 1, 4 << 20), (128, 2, 4 << 20))
)
def test_a_forward_takes_no_more_than_was_forecast(
    device, rows, prompts, most, tmp_path, monkeypatch
) -> None:
    """Pieces of prompts as long as their context, whose rows attend in one launch or in several;
    two where the first leaves room for a row; then the experts' rows are many."""
    directory = toy.write_checkpoint(tmp_path / "toy", drafter={}, max_position_embeddings=rows + 1)
    kernels = ops.CudaOps("bfloat16", launcher=launcher(device))
    settings = {"activation": "bfloat16", "batch": prompts, "prefill_chunk": rows}
    made = engine_on(device, directory, monkeypatch, kernels, **settings)
    for module in (ops, ops_mma):
        monkeypatch.setattr(module, "PARTS_BYTES", most)
    forecast = made.forecast()["scratch"] - ops_mma.MEETING_BYTES  # which no product here has
    params = SamplingParams(max_tokens=1)
    sequences = [made.submit([7 + i] * (rows - i), params) for i in reversed(range(prompts))]
    tracemalloc.start()
    made.step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(sequence.finish_reason for sequence in sequences)
    assert forecast / 4 < peak <= forecast


def test_weights_that_no_cpu_here_can_hold_are_not_read(tmp_path, monkeypatch) -> None:
    directory = toy.write_checkpoint(tmp_path / "toy", drafter={})
    made = toy.engine_of(directory, drafter=True)
    need, slots = made.host_bytes(), made.settings.decode.batch
    cache = 4 * (made.cache_values() + slots * made.n_pages)
    assert cache == made.cache.pages.nbytes + made.cache.draft.nbytes + made.cache.tables.nbytes
    sizes = {"SC_PHYS_PAGES": need - 1, "SC_PAGE_SIZE": 1, "SC_AVPHYS_PAGES": 1 << 30}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    with monkeypatch.context() as patch, pytest.raises(UserError, match="GiB of memory, the wei"):
        patch.setattr(engine.loader, "stream_target", None)  # not called
        toy.engine_of(directory, drafter=True)
    sizes["SC_PHYS_PAGES"] = need + cache - 1
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the cache .*decode.pages"):
        patch.setattr(engine.loader, "stream_target", None)
        toy.engine_of(directory, drafter=True)
    sizes["SC_PHYS_PAGES"] = need + cache
    toy.engine_of(directory, drafter=True)


def test_interrupts_at_any_line_leave_nothing_behind(tmp_path) -> None:
    """Ctrl-C between any two lines of a step or a cancellation: what is live goes on to its own
    tokens, and no slot or page is lost or given twice."""
    made = toy.toy_engine(tmp_path, drafter={}, batch=2, pages=6)
    prompts, params = [[1, 2, 3], [7] * 17, [9] * 16, [5] * 33], SamplingParams(max_tokens=20)
    want = [made.generate([p], params)[0].token_ids for p in prompts]
    files = tuple(str(ROOT / name) for name in ("engine.py", "cache.py"))
    lines, last = 0, 0

    def trace(frame, event, _):
        nonlocal lines
        # A signal is handled before or after a call, that of a block's __exit__ included; a tracer
        # alone can raise where such a block ends, and would leave the lock taken.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith("with ") and (lines := lines + 1) == last:
            raise KeyboardInterrupt
        return trace if frame.f_code.co_filename in files else None

    def traced(work) -> None:
        nonlocal lines
        lines = 0
        sys.settrace(trace)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)

    for turn in range(50):
        live = [made.submit(p, params) for p in prompts]
        made.use("tree", config.AUTO)  # with texts waiting: it is measured in a step of theirs
        last = 1 + 67 * turn % 1500
        traced(lambda: [made.step() for _ in range(30)])
        last = 1 + turn % 40
        unwanted = live[turn % 4]
        traced(partial(made.cancel, unwanted))
        made.cancel(unwanted)
        for _ in range(200):
            made.step()
        assert all(s.finish_reason for s in live), last
        for sequence, ids in zip(live, want, strict=True):
            n = len(ids) if sequence.finish_reason != "cancelled" else sequence.n_emitted
            assert sequence.emitted == ids[:n]
        assert sorted(made.cache.free_slots) == [0, 1]
        assert made.cache.available == made.cache.n_pages
        assert len(set(made.cache.free_pages)) == len(made.cache.free_pages)


@KERNELS
def test_i5_every_kernel_fits_a_small_block_or_is_named(device, tmp_path, monkeypatch) -> None:
    """As on sm_120: K2.6 fits with every tree; what would not is named before weights are read; and
    no launch asks for more than start-up has checked."""
    kernels = ops.CudaOps(launcher=launcher(device))
    limits = launchers.Limits("small", "sm_120", SMALL, 1)
    tensor = dict.fromkeys(ops.TENSOR, True)
    small = SimpleNamespace(launcher=SimpleNamespace(limits=limits), name="cuda", **tensor)
    dims = {
        **toy.DIMS,
        **dict(hidden_size=7168, num_attention_heads=64, q_lora_rank=1536, kv_lora_rank=512),
        **dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=384),
        **dict(intermediate_size=18432, moe_intermediate_size=2048, num_experts_per_tok=8),
        "quantization_config": toy.INT4,
    }
    k26 = config.parse_model(dims, source="K2.6")
    drafter = SimpleNamespace(head_dim=128, block_size=8)
    for budget in (1, 2, 7, 8, 16, 33, 64, 256):
        ops.CudaOps.check_fit(small, k26, drafter, 64, budget)
    with pytest.raises(UserError, match="build_trees: needs .* lower draft.budget"):
        ops.CudaOps.check_fit(small, k26, drafter, 64, 2048)
    with pytest.raises(UserError, match="_spans: needs .* on small has 101376; lower decode.leaf"):
        ops.CudaOps.check_fit(small, k26, drafter, 8192, 64)
    many = config.parse_model({**dims, "n_routed_experts": 9000}, source="many")
    with pytest.raises(UserError, match="expert_gate_up_mma: .* use kernels.moe: simple"):
        ops.CudaOps.check_fit(small, many, drafter, 64, 64)

    directory = toy.write_checkpoint(tmp_path / "toy", drafter={})
    with monkeypatch.context() as patch:
        patch.setattr(kernels.launcher, "limits", launchers.Limits("tiny", "sm_00", 1024, 1))
        with pytest.raises(UserError, match=r"\w+: needs \d+ bytes of shared memory"):
            engine_on(device, directory, patch, kernels)


@KERNELS
@pytest.mark.parametrize("activation", ("float32", "bfloat16"))
def test_every_kernel_with_shared_memory_is_checked_at_start_up(
    device, activation, tmp_path, monkeypatch
) -> None:
    """No launch asks for dynamic shared memory that `shared_needs` does not name."""
    kernels = ops.CudaOps(activation, launcher=launcher(device))
    tensor = {name: getattr(kernels, name) for name in ops.TENSOR}
    directory = toy.write_checkpoint(tmp_path / "toy", drafter={})
    made = engine_on(device, directory, monkeypatch, kernels)
    launches: list[ops.Launch] = []
    kernels.listener = launches.append
    penalised = dict(repetition_penalty=1.1, temperature=0.5, seed=1, max_tokens=3)
    toy.decode(made, [[1, 2, 3]], "tree", made.settings.draft.budget, **penalised)
    needs = ops.shared_needs(made.dims, made.draft_dims, 16, made.settings.draft.budget, **tensor)
    asked = {}
    for launch in launches:
        if launch.shared_bytes:
            kernel = re.sub(r"_mma(_\d)+$", "_mma", launch.kernel)
            asked[kernel] = max(launch.shared_bytes, asked.get(kernel, 0))
    assert len(asked) > 4
    for kernel, most in asked.items():
        assert kernel in ops.ADAPTIVE or most <= needs[kernel], kernel


# ---- a kernel that fails -----------------------------------------------------------------------


@KERNELS
def test_a_kernel_that_fails_is_named_in_one_line(device, tmp_path) -> None:
    """A read far out of bounds, in a process of its own: a GPU's context does not survive it."""
    for pattern in ("*.py", "*.cu"):
        for file in ROOT.glob(pattern):
            shutil.copy(file, tmp_path)
    shutil.copytree(ROOT / "tests/emulator", tmp_path / "tests/emulator")
    source = tmp_path / "kernels.cu"
    text, residual = source.read_text(), "__fadd_rn(values[c][i], round_to_act(others[c][i]))"
    assert text.count(residual) == 1
    source.write_text(text.replace(residual, "*(volatile float*)(x + (1ll << 42))"))
    toy.write_checkpoint(tmp_path / "toy")
    settings = {"model": {"path": "toy"}, "decode": {"leaf": 16}}
    (tmp_path / "toy.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "engine.py", "--config", "toy.yaml", "--device", device]
    for flag in ("--debug-kernels", None):
        done = subprocess.run(
            [*command, "--prompt", "abc", "--max-tokens", "2", *([flag] if flag else [])],
            cwd=tmp_path, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        lines = [row for row in done.stderr.splitlines() if "vision tensors" not in row]
        assert done.returncode == config.DEVICE_FAULT, done.stderr
        assert len(lines) == 1, done.stderr
        if flag or device == "emulate":
            assert lines[0].startswith("error: add_rms_norm with a grid of ("), done.stderr
        else:
            assert lines[0].endswith("--debug-kernels names it"), done.stderr


# ---- old or shared compiled code ---------------------------------------------------------------


@KERNELS
def test_i1_a_changed_prelude_or_option_compiles_again(device, tmp_path) -> None:
    source = tmp_path / "kernels.cu"
    text = (
        "// ==== prelude ====\n__device__ float shared_value() { return 1; }\n"
        '// ==== probe ====\nextern "C" __global__ void probe(float* y) {\n'
        "  if (threadIdx.x == 0) y[0] = shared_value() + OPTION;\n}\n"
    )

    def value(kernels, option: int) -> float:
        y = kernels.empty((1,))
        kernels._launch("probe", "probe", (1,), y, defines=(("OPTION", option),))
        return float(kernels.download(y)[0])

    def fresh() -> ops.CudaOps:
        return ops.CudaOps(launcher=launcher(device), directory=tmp_path)

    source.write_text(text)
    first = fresh()
    assert value(first, 10) == 11 and value(first, 20) == 21
    source.write_text(text.replace("return 1", "return 2"))
    assert value(fresh(), 10) == 12 and value(fresh(), 20) == 22  # as in a process started anew
    assert value(first, 10) == 11
    assert first.reload() == ["prelude", "probe"] and value(first, 10) == 12


SCRIPT = """
import sys, numpy as np, launchers, ops
launcher = launchers.CudaLauncher() if sys.argv[1] == "cuda" else launchers.EmulatorLauncher()
kernels = ops.CudaOps(launcher=launcher)
x = launcher.upload(np.linspace(-3, 3, 1000, dtype=np.float32).reshape(4, 250))
print(kernels.download(kernels.silu_mul(x, x)).tobytes().hex())
"""


@KERNELS
def test_i1_processes_start_with_one_empty_cache(device, tmp_path) -> None:
    """Eight of them; three for the emulator, whose cache is made alike and slow to fill."""
    environment = {
        **os.environ, "XDG_CACHE_HOME": str(tmp_path), "CUPY_CACHE_DIR": str(tmp_path / "cupy"),
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, device]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    n = 8 if device == "cuda" else 3
    started = [subprocess.Popen(command, env=environment, cwd=ROOT, **pipes) for _ in range(n)]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * n, outputs
    assert len({out for out, _ in outputs}) == 1 and len(outputs[0][0]) == 8001
