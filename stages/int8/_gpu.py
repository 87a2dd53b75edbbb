"""What a GPU says of this ladder: times from a graph, memory, and the baseline at the size that was once left out.

`python -m stages.int8._gpu --save DIR` needs CuPy and PyTorch; bitsandbytes where it is installed.
"""

import argparse
import contextlib
import copy
import importlib
import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

COLD = 300e6  # bytes of copies that a graph walks through, several times an L2: so weights come from memory
REPLAYS = 20
WINDOW = 256  # tokens of a forward whose memory is measured
SHARE = 0.0147  # of channels that are outliers in SmolLM2, as reports/ has it; for memory only
SMOLLM2 = {"L": 30, "D": 576, "F": 1536, "H": 9, "G": 3, "hd": 64, "V": 49152}


def together() -> None:
    """Let CuPy take its memory from PyTorch, so that one counter sees both, and a graph's memory is its own."""
    import cupy
    import torch

    def take(size, device):
        return torch.cuda.caching_allocator_alloc(size) if size else 0

    def give(pointer, device):
        if pointer:
            torch.cuda.caching_allocator_delete(pointer)

    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(take, give).malloc)


def graphed(calls) -> float:
    """Microseconds of each of several calls, captured one after the other in one graph: the median of REPLAYS."""
    import torch

    from common.cuda_attention import stream as of_pytorch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), of_pytorch(stream), torch.no_grad():
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [call() for call in calls]
        times = []
        for _ in range(REPLAYS):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            stop.record(stream)
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / len(calls))
        del kept
    return statistics.median(times)


def eager(calls) -> float:
    """As graphed, but each call launched by Python: for what a graph cannot hold."""
    import torch

    times = []
    with torch.no_grad():
        for _ in range(5):
            torch.cuda.synchronize()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for call in calls:
                call()
            stop.record()
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times[1:])


def linear8bit(w, b, threshold: float):
    """A Linear8bitLt with weights w (N, K) and b (N,), PyTorch tensors of the GPU or None."""
    import bitsandbytes as bnb

    layer = bnb.nn.Linear8bitLt(
        w.shape[1], w.shape[0], bias=b is not None, has_fp16_weights=False, threshold=threshold
    )  # fmt: skip
    layer.load_state_dict({"weight": w.cpu()} | ({} if b is None else {"bias": b.cpu()}))
    return layer.half().cuda().eval()


def layer_times() -> list[dict]:
    """A layer at each shape of the ladder, weights cold, by every rung and baseline."""
    import torch

    from stages import int8

    rows = []
    for t, n, k in int8.SHAPES:
        x, w, b, seen = int8.inputs((t, n, k), "int8", 1)
        count = int(COLD / (n * k)) + 1
        exact = torch.from_dlpack(x).double() @ torch.from_dlpack(w).double().T + torch.from_dlpack(b).double()

        def add(name, calls, how=graphed, shape=(t, n, k), exact=exact, **more):
            row = {"stage": name, "shape": shape, "graph": how is graphed, **more}
            try:
                with torch.no_grad():
                    out = torch.from_dlpack(calls[0]())
                row["nmse"] = float(((out.double() - exact) ** 2).sum() / (exact**2).sum())
                row["us"] = how(calls)
            except Exception as error:  # a library may raise anything
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            rows.append(row)
            print(row, flush=True)

        for rung in ("absmax", "outliers", "tensor_core"):
            module = importlib.import_module(f"stages.int8.{rung}")
            layers = [module.quantize(w, b, seen) for _ in range(count)]
            add(rung, [partial(module.multiply, x, layer) for layer in layers])
            del layers
        tx, tb = torch.from_dlpack(x), torch.from_dlpack(b)
        copies = [torch.from_dlpack(w).clone() for _ in range(count // 2 + 1)]
        add("fp16", [partial(torch.nn.functional.linear, tx, w, tb) for w in copies])
        add("fp16 without b", [partial(torch.nn.functional.linear, tx, w) for w in copies])
        del copies
        try:
            first = linear8bit(torch.from_dlpack(w), tb, 0.0)
            for threshold in (0.0, 6.0):
                layers = [copy.deepcopy(first) for _ in range(count)]
                for layer in layers:
                    layer.state.threshold = threshold
                for how in (eager,) if threshold else (graphed, eager):
                    add("bitsandbytes", [partial(layer, tx) for layer in layers], how, threshold=threshold)
                del layers
        except ImportError as error:
            rows.append({"stage": "bitsandbytes", "shape": (t, n, k), "error": str(error)})
        torch.cuda.empty_cache()
    rows.append({"stage": "bitsandbytes", "threshold": 6.0, "graph": True, "error": captured()})
    return rows


def captured() -> str | None:
    """Why a graph can't hold a Linear8bitLt that looks for outliers; None where it can. The last thing of a process."""
    import torch

    try:
        layer = linear8bit(torch.randn(64, 64, device="cuda"), None, 6.0)
        graphed([partial(layer, torch.randn(1, 64, device="cuda", dtype=torch.half))])
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def left_out() -> list[dict]:
    """Linear8bitLt(512, V) at the vocabulary that was left out and at the multiples of 4 around it, or its error."""
    import torch

    rows = []
    for v in (52239, 52236, 52240):
        torch.manual_seed(0)
        w, b = (
            torch.randn(v, 512, device="cuda", dtype=torch.half) / 22,
            torch.randn(v, device="cuda", dtype=torch.half),
        )
        for threshold in (0.0, 6.0):
            layer = linear8bit(w, b, threshold)
            for tokens in (1, 7, 8, 64, 65, 128, 256, 511, 512):
                row = {"V": v, "tokens": tokens, "threshold": threshold}
                x = torch.randn(tokens, 512, device="cuda", dtype=torch.half)
                x[:, 3] *= 20
                try:
                    with printed(row), torch.no_grad():
                        out = layer(x)
                        torch.cuda.synchronize()
                    exact = x.double() @ w.double().T + b.double()
                    row["nmse"] = float(((out.double() - exact) ** 2).sum() / (exact**2).sum())
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:500]
                rows.append(row)
                print(row, flush=True)
    return rows


@contextlib.contextmanager
def printed(row: dict):
    """Keep what a library writes past Python's own streams as row["printed"]."""
    with tempfile.TemporaryFile() as file:
        streams = [os.dup(1), os.dup(2)]
        for at in (1, 2):
            os.dup2(file.fileno(), at)
        try:
            yield
        finally:
            for at, stream in enumerate(streams, 1):
                os.dup2(stream, at)
                os.close(stream)
            file.seek(0)
            if text := file.read().decode(errors="replace").strip():
                row["printed"] = text[:500]


def memory() -> list[dict]:
    """SmolLM2's shape, random weights: bytes of the model at rest, and the most of a forward of WINDOW tokens."""
    import torch

    rows = []
    for output in (True, False):
        for kind in ("fp16", "tensor_core", "bitsandbytes"):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            base = torch.cuda.memory_allocated()
            row = {"layers": kind, "output_projection": output, "tokens": WINDOW}
            try:
                model = Model(kind, output)
                torch.cuda.synchronize()
                static = torch.cuda.memory_allocated() - base
                with torch.no_grad():
                    for _ in range(2):
                        torch.cuda.reset_peak_memory_stats()
                        out = model(torch.arange(WINDOW, device="cuda"))
                        peak = torch.cuda.max_memory_allocated() - base
                        finite = bool(torch.isfinite(out).all())
                        del out
                row |= {"static_bytes": static, "peak_bytes": peak, "finite": finite, **model.counted}
                del model
            except ImportError as error:
                row["error"] = str(error)
            rows.append(row)
            print(row, flush=True)
    return rows


class Model:
    """SmolLM2 in PyTorch with linear layers of one kind; `output` says whether the output projection is one of them."""

    def __init__(self, kind: str, output: bool):
        import torch

        s, self.kind, self.counted = SMOLLM2, kind, {"weights": 0, "outliers": 0, "channels": 0}
        torch.manual_seed(0)
        self.loud = {}
        for k in (s["D"], s["F"]):
            self.loud[k] = torch.ones(k, device="cuda")
            self.loud[k][torch.randperm(k)[: round(SHARE * k)]] = 20
        if kind == "tensor_core":
            import cupy

            self.nothing = cupy.zeros(s["V"], "float16")  # no layer has a b
        D, F, q, kv = s["D"], s["F"], s["H"] * s["hd"], s["G"] * s["hd"]
        self.embedding = torch.randn(s["V"], D, device="cuda", dtype=torch.half) / 24
        self.norms = torch.ones(2 * s["L"] + 1, D, device="cuda", dtype=torch.half) * self.loud[D].half()
        shapes = ((q, D), (kv, D), (kv, D), (D, q), (F, D), (F, D), (D, F))
        self.layers = [[self.linear(n, k) for n, k in shapes] for _ in range(s["L"])]
        self.output = self.linear(*self.embedding.shape, self.embedding, kind if output else "fp16")

    def linear(self, n: int, k: int, w=None, kind: str | None = None):
        """A function (T, K) -> (T, N) with random weights, or those given."""
        import torch

        w, kind = torch.randn(n, k, device="cuda", dtype=torch.half) / 24 if w is None else w, kind or self.kind
        if kind == "fp16":
            return lambda x: torch.nn.functional.linear(x, w)
        self.counted["weights"] += n * k
        self.counted["channels"] += k
        if kind == "bitsandbytes":
            return linear8bit(w, None, 6.0)
        import cupy

        from stages.int8 import tensor_core

        layer = tensor_core.quantize(cupy.from_dlpack(w), self.nothing[:n], cupy.from_dlpack(self.loud[k]))
        self.counted["outliers"] += len(layer.loud)
        return lambda x: torch.from_dlpack(tensor_core.multiply(cupy.from_dlpack(x), layer))

    def __call__(self, ids):  # (T,) -> (T, V)
        import torch

        s, T = SMOLLM2, len(ids)
        norm = lambda x, i: torch.nn.functional.rms_norm(x, x.shape[1:], self.norms[i], 1e-5)  # noqa: E731
        heads = lambda x: x.reshape(1, T, -1, s["hd"]).transpose(1, 2)  # noqa: E731
        x = self.embedding[ids]
        for i, (q, k, v, o, gate, up, down) in enumerate(self.layers):
            h = norm(x, 2 * i)
            seen = torch.nn.functional.scaled_dot_product_attention(
                heads(q(h)), heads(k(h)), heads(v(h)), is_causal=True, enable_gqa=True
            )
            x = x + o(seen.transpose(1, 2).reshape(T, -1))
            h = norm(x, 2 * i + 1)
            x = x + down(torch.nn.functional.silu(gate(h)) * up(h))
        return self.output(norm(x, 2 * s["L"]))


def versions() -> dict:
    import torch

    from common import kernel_gpu

    found = kernel_gpu.machine() | {"cuda_of_torch": torch.version.cuda}
    try:
        import bitsandbytes

        found["bitsandbytes"] = bitsandbytes.__version__
    except ImportError:
        found["bitsandbytes"] = None
    return found


PARTS = {"left_out": left_out, "memory": memory, "graph": layer_times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, required=True, help="folder for the records")
    parser.add_argument("--part", choices=PARTS, action="append", help="this one only")
    options = parser.parse_args()
    together()
    options.save.mkdir(parents=True, exist_ok=True)
    for name in options.part or PARTS:
        document = {"schema": 1, "machine": versions(), "rows": PARTS[name]()}
        (options.save / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
