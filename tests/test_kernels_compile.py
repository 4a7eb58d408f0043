"""All device code compiles for every architecture without a GPU, does not spill, and fits.

Prints registers and shared memory of every kernel (`pytest --architectures
tests/test_kernels_compile.py`, as .ci/run does; a plain run compiles for sm_90 alone). Sizes are
those of Kimi K2.6 on one of eight ranks.
"""

from __future__ import annotations

import io
import re

import pytest

import ops
import ops_mma

core = pytest.importorskip("cuda.core", reason="compiling needs cuda-core and nvidia-cuda-nvrtc")

TARGETS = {"sm_90": "sm_90a"}  # as CudaLauncher compiles
ARCHITECTURES = {"sm_80": 166_912, "sm_90": 232_448, "sm_120": 101_376}  # shared bytes of a block
# What of the prelude has the activation type in it.
TYPED = re.compile(r"\b(act|ACTIVATION_BF16|Dense|Int4|rotate|round_to_act|load_act)\b")
TARGET = ops_mma.attention_defines(key=576, value=512, leaf=64, span=4)
DRAFTER = ops_mma.attention_defines(key=128, value=128, leaf=64, span=4)
OF_BLOCKS = ops_mma.AttentionShape(key=128, value=128, leaf=64, span=4, apart=True)
LATENT = ops_mma.AttentionShape(key=576, value=512, leaf=64, span=4, apart=False)
EXPERTS = ops_mma.TensorExperts(
    None, None, None, experts=384, width=256, hidden=7168, leaves=1, up_groups=4, down_groups=4
)
QUERY = ops_mma.QueryShape(lora=1536, latent=512, nope=128, rope=64)
HEADS = [ops_mma.TensorHeads(None, 8, *sizes) for sizes in ((512, 128), (128, 512))]
VARIANTS = {
    "tokens": [ops.TOKEN_DEFINES],
    "experts_mma": [EXPERTS.defines(8, ops_mma.Residents(3, n)) for n in ops_mma.DOWN_RESIDENTS],
    "experts_wide": [EXPERTS.defines(8, way) for way in ops_mma.MANY],
    "absorb_mma": [h.defines for h in HEADS],
    "query_mma": [QUERY.defines],
    "route": [(("PER_THREAD", 2),)],
    "embed": [(("TABLE", t),) for t in ops.TYPES.values()],
    "absorb": [(("TABLE", t),) for t in ops.TYPES.values()],
    "rms_norm": [ops.norm_defines(width, clusters=False) for width in (7168, 1536)],
    "attention": [TARGET, DRAFTER],
    "attention_work": [(("LEAF", 64), ("SPAN", 4))],
    "peer_sum": [(("RANKS", n),) for n in (2, 4, 8)],
    **dict.fromkeys(
        ("linear", "gate_up", "expert_down"),
        [(("WEIGHT", w),) for w in ("DenseBf16", "Int4Bf16", "DenseF32", "Int4F32")],
    ),
}
DYNAMIC = {  # shared bytes that ops.py asks for, by kernel or kernel and defines
    ("latent_spans", TARGET): ops.SHARED_BYTES["latent_spans"](576, 64),
    ("block_spans", DRAFTER): ops.SHARED_BYTES["block_spans"](128, 64),
    "latent_query": ops.SHARED_BYTES["latent_query"](nope=128),
    "block_inputs": ops.SHARED_BYTES["block_inputs"](128),
    "put_context": ops.SHARED_BYTES["put_context"](128),
    "expert_gate_up_mma": EXPERTS.up_shared_bytes(rows=128, top_k=8),
    "expert_down_mma": EXPERTS.down_shared_bytes(rows=32, top_k=8),
    **{
        ("expert_gate_up_wide", EXPERTS.defines(8, way)): EXPERTS.many_up_shared_bytes(way)
        for way in ops_mma.MANY
    },
    **{
        ("expert_down_wide", EXPERTS.defines(8, way)): EXPERTS.many_down_shared_bytes(way)
        for way in ops_mma.MANY
    },
    "query_mma": QUERY.shared_bytes,
    "route": ops.SHARED_BYTES["route"](experts=384, top_k=8),
    "sort_pairs": ops.SHARED_BYTES["sort_pairs"](),
    "log_softmax_top": ops.SHARED_BYTES["log_softmax_top"](k=64),
    "build_trees": ops.SHARED_BYTES["build_trees"](budget=64, depth=7, width=64),
}
SPILLS = {"latent_spans_mma_8": 160}  # bytes, between leaves: its sums fill the registers
PTXAS = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.S,
)


def compile_section(section: str, architecture: str, activation: str, defines) -> str:
    """What ptxas says of the section's kernels. Raises with the compiler's lines on an error."""
    sections = ops.read_sections()
    macros = [tuple(d[2:].split("=")) for d in ops.defines_of(activation, defines)]
    options = core.ProgramOptions(
        arch=TARGETS.get(architecture, architecture), std="c++17", fma=False, ftz=True,
        define_macro=macros, ptxas_options=["-v"],
    )  # fmt: skip
    log = io.StringIO()
    source = sections[section].source(sections["prelude"])
    core.Program(source, "c++", options).compile("cubin", logs=log)
    return log.getvalue()


def dense_bytes(kernel: str, architecture: str) -> int | None:
    """Most dynamic shared bytes of a dense tensor-core kernel with K in at most 8 parts."""
    most = ARCHITECTURES[architecture]
    eights, wide = map(int, kernel.split("_")[-2:])
    [tile] = [t for t in ops_mma.TILES if (t.eights, t.wide) == (eights, wide)]
    need = ops_mma.linear_shared_bytes(tile, tile.ahead, own=1)
    return need if need <= most else None


def wide_bytes(kernel: str, architecture: str) -> int | None:
    """The same of many rows' kernel, with a part a warp."""
    [tile] = [t for t in ops_mma.WIDE_VARIANTS if kernel.endswith(t.name)]
    need = tile.shared_bytes(own=1)
    return need if need <= ARCHITECTURES[architecture] else None


def attention_bytes(kernel: str, architecture: str, defines) -> int | None:
    """The same of an attention kernel on tensor cores."""
    shape, stages = (OF_BLOCKS, 1) if "block" in kernel else (LATENT, dict(defines)["STAGES"])
    [tile] = [t for t in ops_mma.COLUMN_TILES if kernel.endswith(f"_spans_{t.name}")]
    need = shape.shared_bytes(tile, stages)
    return need if need <= ARCHITECTURES[architecture] else None


def latent_stages(architecture: str) -> list[int]:
    """Leaves in flight that ops.py chooses for some column tile: two where they fit."""
    most = ARCHITECTURES[architecture]
    needs = ([LATENT.shared_bytes(t, n) for n in (2, 1)] for t in ops_mma.COLUMN_TILES)
    return sorted({2 if two <= most else 1 for two, one in needs if one <= most})


# What float32 activations change in the code, and float32 weights, does not depend on the
# architecture.
@pytest.mark.parametrize(
    "architecture, activation", [("sm_90", "float32"), *((a, "bfloat16") for a in ARCHITECTURES)]
)
def test_every_section_compiles(architecture: str, activation: str, request, capsys) -> None:
    if architecture != "sm_90" and not request.config.getoption("architectures"):
        # It takes 25 s an architecture of two cores; .ci/run asks for them.
        pytest.skip("a plain run compiles for sm_90 alone; pytest --architectures for all")
    rows, faults = [], []
    for section in ops.read_sections():
        if section == "prelude":
            continue
        if section.endswith("_mma") and activation == "float32":
            continue  # tensor cores take bfloat16 activations
        if activation == "float32" and not TYPED.search(ops.read_sections()[section].text):
            continue  # the same code as with bfloat16
        if section == "query_mma" and architecture == "sm_80":
            continue  # it has no clusters
        variants = VARIANTS.get(section, [()])
        if section == "experts_mma" and architecture == "sm_120":
            variants = variants[:1]  # there is no room for three blocks
        if section == "experts_wide" and architecture != "sm_90":  # see _many_ways
            variants = [EXPERTS.defines(8, way) for way in ops_mma.MANY if not way.warpgroups]
        if section in ("linear", "gate_up", "expert_down") and architecture != "sm_90":
            variants = variants[:2]
        if section == "linear_mma":
            variants = [ops_mma.LINEAR_DEFINES]
        if section == "wide_mma":
            variants = [ops_mma.wide_defines(ARCHITECTURES[architecture])]
        if section == "rms_norm" and architecture != "sm_80":
            variants = [*variants, ops.norm_defines(7168, clusters=True)]
        if section == "attention_mma":
            variants = [*map(LATENT.defines, latent_stages(architecture)), OF_BLOCKS.defines(1)]
        for defines in variants:
            text = compile_section(section, architecture, activation, defines)
            for kernel, stores, loads, registers, rest in PTXAS.findall(text):
                static = int((re.search(r"(\d+) bytes smem", rest) or [0, 0])[1])
                dynamic = DYNAMIC.get((kernel, defines), DYNAMIC.get(kernel, 0))
                name = " ".join([kernel, *(str(v) for _, v in defines)])
                if section == "linear_mma":
                    dynamic, name = dense_bytes(kernel, architecture), kernel
                if section == "wide_mma":
                    dynamic, name = wide_bytes(kernel, architecture), kernel
                room = ARCHITECTURES[architecture] - static
                if section in ("experts_wide", "query_mma") and dynamic > room:
                    dynamic = None
                if "_spans_" in kernel and section == "attention_mma":
                    dynamic = attention_bytes(kernel, architecture, defines)
                if dynamic is None:
                    continue  # ops.py does not launch it here
                rows.append(f"| {name} | {registers} | {static} | {dynamic} |")
                if int(stores) + int(loads) > SPILLS.get(kernel, 0):
                    faults.append(f"{name}: spills {stores} + {loads} bytes")
                if static + dynamic > ARCHITECTURES[architecture]:
                    faults.append(f"{name}: {static + dynamic} bytes of shared memory")
    head = f"| {architecture}, {activation} | registers | static B | dynamic B |"
    with capsys.disabled():
        print("\n", head, "|---|---|---|---|", *rows, sep="\n")
    assert len(rows) > 20
    assert not faults, f"{architecture}, {activation}: " + "; ".join(faults)


def test_an_error_has_the_file_s_own_line() -> None:
    """The compiler's message names kernels.cu and the line as an editor shows it."""
    sections = ops.read_sections()
    section = sections["plan"]
    broken = section.text.replace("int node = t;", "int node = t\n;@", 1)
    line = section.line + section.text[: section.text.index("int node = t;")].count("\n") + 1
    source = ops.Section("plan", section.file, section.line, broken).source(sections["prelude"])
    macros = [tuple(d[2:].split("=")) for d in ops.defines_of("float32")]
    options = core.ProgramOptions(arch="sm_90", std="c++17", define_macro=macros)
    with pytest.raises(Exception) as caught:
        core.Program(source, "c++", options).compile("cubin")
    assert f"kernels.cu({line})" in str(caught.value)
