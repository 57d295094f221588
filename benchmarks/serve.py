"""How fast is the embedded server? Tokens per second through HTTP against transformers' batched ``generate`` in the same run, and
against SGLang and vLLM where their environments are given. Two models: SmolLM2-135M and a small random Qwen3-MoE made here.

Every engine gets the same prompts, exact output lengths (no end-of-sequence), temperature 1, two threads, bf16. Cases: so many requests
of equal lengths at once (1, 8, 32), and "ragged": twice as many as run at once, prompts of 16 to 128 tokens, answers of 8 to 256 (most are
short). transformers takes ragged requests in the order in which they come, in padded batches, as ``generate`` does. Engines alternate;
the median of the rounds is printed, prefill included.

    python benchmarks/serve.py [--model FOLDER] [--threads 2] [--rounds 3] [--sglang-python P] [--vllm-python P]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
START_S = 300.0
VOCAB = 49152
MOE = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    new: int


@dataclass(frozen=True)
class Case:
    """``concurrency`` of the ``requests`` are under way at a time."""

    name: str
    concurrency: int
    requests: list[Request]

    @property
    def tokens(self) -> int:
        return sum(r.new for r in self.requests)


class Engine(Protocol):
    name: str

    def run(self, case: Case) -> float:
        """Seconds for all requests of a case; raises where an answer has another length than was asked for."""


def cases(vocab: int, concurrencies: list[int]) -> list[Case]:
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(1000, vocab) for _ in range(length)]

    out = [Case(f"{c} at once", c, [Request(prompt(64), 64) for _ in range(c)]) for c in concurrencies]
    for c in (c for c in concurrencies if c > 1):
        # Most answers are short and some are long: log-uniform in 8..256.
        ragged = [Request(prompt(rng.randint(16, 128)), int(8 * 32 ** rng.random())) for _ in range(2 * c)]
        out.append(Case(f"ragged {c}", c, ragged))
    return out


class Http:
    """A server process, driven over HTTP as the rollout client drives it: token ids in, token ids and log-probabilities out."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], health: str, log: IO[bytes]) -> None:
        self.name, self._log = name, log
        self.port = free_port()
        command = [part.format(port=self.port) for part in command]
        self._process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | env, start_new_session=True, cwd=ROOT)
        self._url, self._health = f"http://127.0.0.1:{self.port}", health

    def wait(self) -> None:
        import urllib.error
        import urllib.request

        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self._url + self._health, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self._log.seek(0)
        raise SystemExit(f"{self.name} did not start: {self._log.read()[-2000:].decode(errors='replace')}")

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)  # SGLang and vLLM are several processes; the group is this one's own
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def run(self, case: Case) -> float:
        return asyncio.run(self._drive(case))

    async def _drive(self, case: Case) -> float:
        import aiohttp

        slots = asyncio.Semaphore(case.concurrency)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(request: Request) -> None:
                async with slots:
                    path, body = self.body(request)
                    async with session.post(self._url + path, json=body) as answer:
                        if answer.status != 200:
                            raise SystemExit(f"{self.name} answered {answer.status}: {(await answer.text())[:500]}")
                        got = self.length(await answer.json())
                        assert got == request.new, f"{self.name} made {got} tokens where {request.new} were asked for"

            start = time.perf_counter()
            await asyncio.gather(*(one(r) for r in case.requests))
            return time.perf_counter() - start

    def body(self, request: Request) -> tuple[str, dict[str, Any]]:
        sampling = {"max_new_tokens": request.new, "temperature": 1.0, "ignore_eos": True}
        return "/generate", {"input_ids": request.prompt, "sampling_params": sampling, "return_logprob": True}

    def length(self, answer: dict[str, Any]) -> int:
        return len(answer["meta_info"]["output_token_logprobs"])


class Vllm(Http):
    def body(self, request: Request) -> tuple[str, dict[str, Any]]:
        sampling = {"max_tokens": request.new, "temperature": 1.0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
        return "/v1/completions", {"model": "served", "prompt": request.prompt, **sampling}

    def length(self, answer: dict[str, Any]) -> int:
        return len(answer["choices"][0]["logprobs"]["token_logprobs"])


class Transformers:
    """``generate`` in a process of its own, so that it has the same threads as the servers; requests in padded batches."""

    name = "transformers"

    def __init__(self, folder: str, env: dict[str, str], log: IO[bytes]) -> None:
        command = [sys.executable, __file__, "--generate-worker", folder]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=os.environ | env, text=True
        )
        self._log = log

    def wait(self) -> None:
        self._answer()

    def run(self, case: Case) -> float:
        assert self._process.stdin is not None
        body = {"batch": case.concurrency, "requests": [[r.prompt, r.new] for r in case.requests]}
        self._process.stdin.write(json.dumps(body) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], START_S)[0]:
            line = self._process.stdout.readline()
            if line:
                return line
        self._log.seek(0)
        raise SystemExit(f"transformers did not answer: {self._log.read()[-2000:].decode(errors='replace')}")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def generate_worker(folder: str) -> None:
    """The other end of ``Transformers``: a case per line in, its seconds out."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    print("ready", flush=True)
    for line in sys.stdin:
        body = json.loads(line)
        start = time.perf_counter()
        for first in range(0, len(body["requests"]), body["batch"]):
            batch = body["requests"][first : first + body["batch"]]
            longest, new = max(len(p) for p, _ in batch), max(n for _, n in batch)
            ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in batch])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in batch])
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new, pad_token_id=0)
            assert out.shape[1] == longest + new
        print(time.perf_counter() - start, flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_moe(folder: Path, tokenizer: str) -> str:
    """A random model, with the dense one's tokenizer: all servers write text too."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **MOE), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return str(folder)


def start(folder: str, args: argparse.Namespace, stack: ExitStack) -> list[Any]:
    """All engines of one model, started and warm."""
    env = {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}

    def log() -> IO[bytes]:
        return stack.enter_context(tempfile.TemporaryFile("w+b"))

    own = [sys.executable, "-m", "areal_mega.serving", folder, "--port", "{port}", "--dtype", "bfloat16"]
    # Every engine computes every prompt: the prompts of the rounds are the same.
    own += ["--prefix-cache-tokens", "0", *args.server_args.split()]
    engines: list[Any] = [Http("embedded", own, env, "/health", log())]
    if not args.only_embedded:
        engines.append(Transformers(folder, env, log()))
    bare = {k: v for k, v in env.items() if k != "PYTHONPATH"}
    if args.sglang_python:
        command = [args.sglang_python, "-m", "sglang.launch_server", "--model-path", folder, "--device", "cpu", "--port", "{port}"]
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
        command += ["--dtype", "bfloat16", "--context-length", "2048", "--max-total-tokens", "32768", "--skip-server-warmup"]
        command += ["--sleep-on-idle", "--disable-radix-cache"]
        engines.append(Http("sglang-cpu", command, bare | {"SGLANG_USE_CPU_ENGINE": "1"}, "/model_info", log()))
    if args.vllm_python:
        command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "served"]
        command += ["--port", "{port}", "--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", "--no-enable-prefix-caching"]
        omp = next(Path(args.vllm_python).parent.parent.rglob("libiomp5.so"), None)
        extra = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}"}
        engines.append(Vllm("vllm-cpu", command, bare | extra | ({"LD_PRELOAD": str(omp)} if omp else {}), "/health", log()))
    for engine in engines:
        stack.callback(engine.close)
    for engine in engines:
        engine.wait()
    return engines


def measure(title: str, folder: str, vocab: int, args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        engines = start(folder, args, stack)
        warm = Case("warm", 4, [Request([5 + i] * 32, 8) for i in range(4)])
        for engine in engines:
            engine.run(warm)
        print(f"\n{title}: tokens/s (median of {args.rounds}; in brackets the embedded server's ratio to it)")
        print(f"{'':>14}" + "".join(f"{e.name:>20}" for e in engines), flush=True)
        for case in cases(vocab, args.concurrency):
            seconds: dict[str, list[float]] = {e.name: [] for e in engines}
            for _ in range(args.rounds):
                for engine in engines:
                    seconds[engine.name].append(engine.run(case))
            rates = {name: case.tokens / median(s) for name, s in seconds.items()}
            ours = rates["embedded"]
            row = "".join(f"{rate:>12.1f} ({ours / rate:4.2f}x)" for rate in rates.values())
            print(f"{case.name:>14}{row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or hub name of the dense model")
    parser.add_argument("--threads", type=int, default=2, help="of every engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--models", nargs="+", choices=["dense", "moe"], default=["dense", "moe"])
    parser.add_argument("--sglang-python", help="interpreter of an environment with SGLang for the CPU")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM for the CPU")
    parser.add_argument("--only-embedded", action="store_true", help="leave transformers out")
    parser.add_argument("--server-args", default="", help="further flags of the embedded server")
    parser.add_argument("--generate-worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generate_worker:
        return generate_worker(args.generate_worker)
    sys.path.insert(0, str(ROOT))
    if "dense" in args.models:
        from areal_mega.models.hf_config import load_hf_config

        measure(args.model, args.model, int(load_hf_config(args.model)["vocab_size"]), args)
    if "moe" in args.models:
        with tempfile.TemporaryDirectory(prefix="serve-moe-") as folder:
            measure("Qwen3-MoE, 8 layers, 32 experts of which 4", make_moe(Path(folder), args.model), VOCAB, args)


if __name__ == "__main__":
    main()
