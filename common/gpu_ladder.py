"""The record of one stage on a GPU's host: `python -m common.gpu_ladder cuda --model FILE --save DIR`.

Loads once, then times every shape in this process, from a GPU at rest to each row of logits in the host's memory, and
checks the answers against the oracle; with --processes it does so in several fresh ones. A CPU stage is recorded
likewise, at shapes that fit the time.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

from common import gate, gpu, gpu_machine, gpu_profile, harness, machine, profile, records, reference
from common.job import SHAPE, prepare, random_ids
from common.stage import load_stage
from common.stats import percentiles, summary

CONTEXT = 1200  # positions allocated: the deepest shape's
CHECKED = 9  # tokens whose logits are held against the oracle
# shape -> samples: what GPU stages are timed at, and what CPU stages and offload's attention leave time for.
SHAPES = {"pp16": 7, "pp64": 5, "pp512": 3, "tg32": 3, "tg128": 3, "tg128@d1024": 1}
SLOW_SHAPES = {"pp16": 5, "pp64": 3, "tg32": 5, "tg128": 3, "pp512": 3, "tg8@d1024": 1}
CPU_SHAPES = {"pp16+tg8": 3}
PROFILED = (16, 64, 512)  # tokens of a prompt, each with four tokens after it; offload's last takes the CPU too long


def row(stage, model, shape: str, samples: int, V: int, settle) -> dict:
    """Times of one shape; its first run is not counted where there are several."""
    found = SHAPE.fullmatch(shape)
    prompt, new, depth = (int(found[part] or 0) for part in ("pp", "tg", "d"))
    new = new or int(found["only"] or 0)
    ids = random_ids(max(prompt, 1) + depth, V)
    taken, gaps = [], []
    for i in range(samples + (samples > 1)):
        settle()
        times, started = [], time.perf_counter()
        for _ in stage.generate(model, ids, new + 1):  # a row that came is here, and the GPU may be at the next already
            times.append(time.perf_counter())
        if i or samples == 1:
            taken.append(((times[0] - started) * 1e3, [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]))
            gaps += taken[-1][1]
    per_token = [sum(one) / len(one) for _, one in taken if one]
    return {
        "shape": shape,
        "prompt": len(ids),
        "new": new + 1,
        "ttft_ms": summary([ttft for ttft, _ in taken]),
        "ms_per_token": summary(per_token) if per_token else None,
        "inter_token_ms": percentiles(gaps) if gaps else None,
        "warm": samples > 1,
    }


def agreement(stage, name: str, gguf, model) -> dict:
    """The logits of a short text against the oracle's, and of a second run against the first's."""
    import numpy as np

    ids = random_ids(CHECKED, gguf.config.V)
    first, second = (stage.logits(model, stage.forward(model, ids, 0)) for _ in range(2))
    want = reference.logits(gguf, ids, rows=len(ids))
    return {
        "nmse": max(map(reference.nmse, first, want)),
        "allowed": gate.tolerance(name),
        "bit_identical": bool(np.array_equal(first, second)),
        "top1": (first.argmax(axis=1) == want.argmax(axis=1)).tolist(),
    }


def call_costs() -> dict:
    """Median us on the host of what a GPU stage's Python calls, the GPU idle before each.

    Between two calls the host works on something else, as it does in a step: repeated at once, a call that finds its
    code and data in the caches looks half as long.
    """
    import cupy
    import numpy as np

    from common.cpu_ops import silu

    runtime, costs = cupy.cuda.runtime, {}
    resident, between = load_stage("resident"), np.ones((16, 5632), np.float32)

    def cost(what: str, call, times: int = 100) -> None:
        taken = []
        for _ in range(times):
            silu(between)
            runtime.deviceSynchronize()
            started = time.perf_counter()
            call()
            taken.append(1e6 * (time.perf_counter() - started))
        costs[what] = {"median_us": median(taken), "min_us": min(taken)}

    a = cupy.ones((1, 2048), np.float32)
    size = np.int64(a.size)
    cost("Program.launch", lambda: resident.PROGRAM.launch("add", 16, 128, (a, a, a, size)))
    cost("an op: pool, launch", lambda: resident.add(a, a))
    for nbytes in (8192, 1 << 20, 12 << 20):
        cost(f"cudaMalloc + cudaFree {nbytes}", lambda n=nbytes: runtime.free(runtime.malloc(n)))
    for nbytes in (8192, 131072, 16 << 20):
        here, there = np.ones(nbytes, np.uint8), cupy.ones(nbytes, np.uint8)
        locked = cupy.cuda.alloc_pinned_memory(nbytes)
        cost(f"asarray {nbytes}", lambda here=here: cupy.asarray(here))
        cost(f"get {nbytes}", lambda there=there: there.get())
        for what, one, other, kind in (("up", there.data.ptr, locked.ptr, 1), ("down", locked.ptr, there.data.ptr, 2)):

            def pinned(one=one, other=other, n=nbytes, kind=kind):
                runtime.memcpyAsync(one, other, n, kind, cupy.cuda.Stream.null.ptr)
                runtime.deviceSynchronize()

            cost(f"pinned {what} {nbytes}", pinned)
    return costs


def profiled(name: str, job) -> dict:
    """Kernels and calls at each of PROFILED, and of a token after the shortest: by T, as gpu_profile gives them."""
    found = {}
    for T in PROFILED[:2] if name == "offload" else PROFILED:
        request = job.request(name, ids=random_ids(T, job.gguf.config.V), n=5, context=T + 5)
        one = gpu_profile.profile_run(request)
        passes = {f"T={T}": one["prefill"], **({"T=1": one["decode"]} if PROFILED[0] == T else {})}
        for key, part in passes.items():
            gpu_profile.judge(part, gpu_machine.measure(), job)
            found[key] = part | {"op_ms": grouped(part["kernels"], "kernel"), "call_ms": by_call(part["calls"])}
        if one["gpu_mb"]["peak"] > found.get("gpu_mb", {"peak": 0})["peak"]:
            found["gpu_mb"] = one["gpu_mb"]
    return found


def grouped(rows: list[dict], key: str) -> dict[str, dict]:
    """{kernel: {ms, calls, share}}"""
    whole: dict[str, dict] = {}
    for one in rows:
        into = whole.setdefault(one[key], {"ms": 0.0, "calls": 0, "share": 0.0})
        for part in into:
            into[part] += one[part]
    return whole


def by_call(rows: list[dict]) -> dict[str, dict]:
    return {one["call"]: one for one in rows}


def host_ops(name: str, job) -> dict:
    """ms by op on the host's clock, of a step of 16 tokens and one of 1: where no op leaves the GPU at work."""
    request = job.request(name, ids=random_ids(16, job.gguf.config.V), n=5, context=32)
    found = profile.profile_run(request)
    ops = {}
    for T, part in ((16, "prefill"), (1, "decode")):
        ops[f"T={T}"] = {"step_ms": found[part]["ms"]}
        for one in found[part]["rows"]:
            ops[f"T={T}"][one["op"]] = ops[f"T={T}"].get(one["op"], 0.0) + one["ms"]
    return ops


def variants(stage, model, V: int, settle) -> dict:
    """ms of cuda with the pool left on, and of its embedding's two halves: what each of the blamed habits costs."""
    import cupy
    import numpy as np

    def ms(call, times=5):
        taken = []
        for _ in range(times + 1):
            settle()
            started = time.perf_counter()
            call()
            settle()
            taken.append((time.perf_counter() - started) * 1e3)
        return median(taken[1:])

    found, using = {}, cupy.cuda.using_allocator
    try:
        cupy.cuda.using_allocator = lambda *_: nullcontext()
        for T in (1, 16, 512):
            ids = random_ids(T, V)
            found[f"pool on, T={T}"] = ms(lambda ids=ids: stage.logits(model, stage.forward(model, ids, 0)[-1:]))
    finally:
        cupy.cuda.using_allocator = using
    ids = np.array(random_ids(512, V))
    rows, there = stage.embed(ids, model.weights.token_embd), cupy.empty((512, model.config.D), np.float32)
    found["embedding, unpack, T=512"] = ms(lambda: stage.embed(ids, model.weights.token_embd))
    found["embedding, copies, T=512"] = ms(lambda: [there[t].set(rows[t]) for t in range(512)])
    return found


def phases(stage, model, V: int) -> dict:
    """By depth, {phase: us a call and calls a step} of a stage that stamps a clock itself, over 128 steps."""
    found, steps = {}, 128
    for depth in (1, 1024):
        rows = stage.generate(model, random_ids(depth, V), steps + 1)
        next(rows)
        stage.stamps(model)[...] = 0  # the first step may be on its way: its first stamps are lost, or those before
        for _ in rows:
            pass
        stamps = zip(stage.PHASES, gpu.host(stage.stamps(model)).tolist(), strict=True)
        found[f"after {depth}"] = {name: {"us": ns / 1e3 / n, "calls": round(n / steps)} for name, (ns, n) in stamps}
    return found


def queued(stage, model, V: int, settle) -> dict:
    """ms after which a forward pass of one token is queued, and after which it is done."""
    taken = []
    for i in range(40):
        settle()
        started = time.perf_counter()
        stage.forward(model, [i % V], 8 + i)
        queued_at = time.perf_counter()
        settle()
        taken.append((1e3 * (queued_at - started), 1e3 * (time.perf_counter() - started)))
    return {"queued": median(q for q, _ in taken[10:]), "done": median(d for _, d in taken[10:])}


def record(name: str, path: str, threads: int, predicted: dict | None, rows_alone: bool = False) -> dict:
    """Everything there is to record of one stage, or its times alone."""
    on_gpu = gpu.on_gpu(name)
    here = gpu_machine.measure() if on_gpu else machine.identify()
    job = prepare(path, shape="pp16", threads=threads, context=CONTEXT)
    stage, gguf = load_stage(name), job.gguf
    settle = gpu.settler(stage)
    shapes = CPU_SHAPES if not on_gpu else SLOW_SHAPES if name == "offload" else SHAPES
    jit_ms, _ = harness.compile_all(stage, job.request(name))
    started = time.perf_counter()
    model = stage.load(gguf, job.context, threads)
    settle()
    load_ms = (time.perf_counter() - started) * 1e3
    found = records.heading(name, job, here) | {"predicted": predicted, "load_ms": load_ms, "jit_ms": jit_ms}
    del found["shape"]
    found["rows"] = [row(stage, model, shape, n, gguf.config.V, settle) for shape, n in shapes.items()]
    found["ms"] = {r["shape"]: (r["ms_per_token"] or r["ttft_ms"])["median"] for r in found["rows"]}
    if rows_alone:
        return found
    found["agreement"] = agreement(stage, name, gguf, model)
    if not on_gpu:
        found["host_ms"] = host_ops(name, job)
    if on_gpu:
        found["compiled"] = compiled(stage)
        found["roofs"] = {"read_gbs": here.read_gbs, "multiply_add_gflops": here.fma_gflops}
        if name == "cuda":
            found["variants_ms"] = variants(stage, model, gguf.config.V, settle)
        if hasattr(stage, "PHASES"):
            return found | {"phases_us": phases(stage, model, gguf.config.V)}
        if name != "offload":
            found["decode_forward_ms"] = queued(stage, model, gguf.config.V, settle)
        del model
        found["profile"] = profiled(name, job)
        if name == "offload":
            found["calls"] = call_costs()
            found["host_ms"] = host_ops(name, job)
    return found


def compiled(stage) -> str:
    """The digest of a stage's programs and options: SOURCE, and STEP where a token has a program of its own."""
    texts = [(stage.SOURCE, stage.OPTIONS)]
    if hasattr(stage, "STEP"):
        texts.append((stage.STEP, stage.STEP_OPTIONS))
    return hashlib.sha256("".join(f"{source}{options}" for source, options in texts).encode()).hexdigest()


def several(name: str, options) -> dict:
    """The record of the first of several fresh processes, with the rows' samples one of each process: its median."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.processes):
            again = [name, "--model", options.model, "--threads", str(options.threads), "--save", folder]
            again += ["--rows"] if i or options.rows else []
            subprocess.run([sys.executable, "-m", "common.gpu_ladder", *again], check=True)
            found.append(json.loads((Path(folder) / f"{name}.json").read_text()))
    for rows in zip(*(one["rows"] for one in found), strict=True):
        for metric in ("ttft_ms", "ms_per_token"):
            if rows[0][metric]:
                rows[0][metric] = summary([one[metric]["median"] for one in rows])
    first = found[0] | {"processes": len(found)}
    first["ms"] = {one["shape"]: (one["ms_per_token"] or one["ttft_ms"])["median"] for one in first["rows"]}
    return first


# ---- what each stage was expected to take, from the records of the stage before --------------------------------

MATMULS = 155  # of a step of TinyLlama's shape: seven a layer, and the logits
ISSUE_GHZ = 132 * 4 * 1.98  # warp instructions a ns of an H200: processors, schedulers, and the clock nvidia-smi shows


def expected(load) -> dict[str, dict[str, float]]:
    """{stage: {shape: ms}} from what load(name) gives of the stage before it, and of calls measured by themselves."""
    quantized, offload, cuda = map(load, ("quantized", "offload", "cuda"))
    mix, V, D, F, L = quantized["model"]["quant_mix"], 32000, 2048, 5632, 22
    output = V * D
    layers = sum(mix.values()) - mix["F32"] - 2 * output
    counted = next(r for r in load("counters")["rows"] if (r["T"], r["grid"]) == (512, f"({512 * F}, 1, 1)"))
    each = counted["warp_instructions"] / (512 * F * D)  # warp instructions a weight and token, from the machine code

    def call(*names: str) -> float:
        return sum(offload["calls"][name]["median_us"] for name in names) / 1e3

    def kernels(T: int) -> float:
        return each * (T * layers + output) / ISSUE_GHZ / 1e6

    def rest(T: int) -> float:
        return quantized["host_ms"][f"T={T}"]["step_ms"] - quantized["host_ms"][f"T={T}"]["matmul"]

    attention = quantized["host_ms"]["T=16"]["attention"]
    up, down = (4 * 512 * L * width for width in (6 * D + F, 3 * D + 2 * F + 512))  # bytes, of 512 tokens
    copies = up / (16 << 20) * call("asarray 16777216") + down / (16 << 20) * call("get 16777216")
    launches = sum(op["calls"] for op in cuda["profile"]["T=16"]["op_ms"].values())
    ran, freed = offload["profile"], cuda["profile"]["T=1"]["call_ms"]

    def queueing(T: int) -> float:
        launch = ran[f"T={T}"]["call_ms"]["cudaLaunchKernel"]
        return launches * (launch["own_ms"] / launch["calls"] + call("cudaMalloc + cudaFree 8192"))

    return {
        "offload": {
            "pp16": rest(16) + MATMULS * call("asarray 131072", "Program.launch", "get 131072") + kernels(16),
            "pp512": 32 * (rest(16) - attention) + 512 * 513 / (16 * 17) * attention + copies + kernels(512),
            "tg32": rest(1) + MATMULS * call("asarray 8192", "Program.launch", "get 8192") + kernels(1),
        },
        "cuda": {
            "pp16": queueing(16) + ran["T=16"]["kernel_ms"],
            "pp512": queueing(16) + 32 * ran["T=16"]["kernel_ms"],
            "tg32": queueing(1) + ran["T=1"]["kernel_ms"],
        },
        "resident": {
            "pp16": cuda["profile"]["T=16"]["kernel_ms"],
            "pp512": cuda["profile"]["T=512"]["kernel_ms"],
            "tg32": cuda["ms"]["tg32"] - freed["cudaMalloc"]["ms"] - freed["cudaFree"]["ms"],
        },
    }


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="fresh ones, each a sample of every row")
    parser.add_argument("--rows", action="store_true", help="times alone")
    parser.add_argument("--predicted", type=Path, help="JSON: stage -> what was predicted before the run")
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args(arguments)
    predicted = json.loads(options.predicted.read_text()) if options.predicted else {}
    for name in options.stages:
        if options.processes > 1:
            found = several(name, options) | {"predicted": predicted.get(name)}
        else:
            found = record(name, options.model, options.threads, predicted.get(name), options.rows)
        records.save(found, options.save / f"{name}.json")
        print(name, {shape: round(ms, 2) for shape, ms in found["ms"].items()}, flush=True)


if __name__ == "__main__":
    main()
