"""vLLM on the same load: its own offline API, its own defaults, the same model, length, dtype and sampling."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from core.interfaces import SamplingParams
from core.loads import Load
from core.resolve import Resolved


def import_vllm() -> Any:
    """The module; ValueError with the command that installs it. Called before anything is built."""
    try:
        vllm = importlib.import_module("vllm")
        for name in ("LLM", "SamplingParams"):  # parts of vllm may be installed without its engine
            getattr(vllm, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"bench.peer=vllm: vllm cannot be used here ({error}); pip install vllm, or leave bench.peer out"
        ) from error
    return vllm


class VLLMPeer:
    """Built after our engine: it takes `share` of the device's memory, and asks for it to be free."""

    def __init__(self, resolved: Resolved, share: float) -> None:
        self.vllm, folder = import_vllm(), resolved.checkpoint.folder
        if folder is None:
            raise ValueError(
                f"bench.peer=vllm reads the model from a directory, and {resolved.checkpoint.name} has none; give "
                "model.path=DIR (python -m benchmarks.gpu.make_checkpoint writes one with random weights)"
            )
        self.llm = self.vllm.LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=resolved.dtype,
            max_model_len=resolved.limits.max_model_len,
            gpu_memory_utilization=share,
            tensor_parallel_size=resolved.tensor_parallel_size,
            enable_prefix_caching=True,
            seed=resolved.seed,
        )

    @property
    def version(self) -> str:
        return str(getattr(self.vllm, "__version__", "unknown"))

    def run_load(self, load: Load, params: Sequence[SamplingParams], clock: Callable[[], float] = time.perf_counter) -> dict:
        """As `core.bench.measure.run_load`, with what the offline API tells."""
        self.llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": tokens} for tokens in load.prompts]
        theirs = [self._params(p) for p in params]
        started = clock()
        outputs = self.llm.generate(prompts, theirs, use_tqdm=False)
        seconds = clock() - started
        got = [len(output.outputs[0].token_ids) for output in outputs]
        if got != load.outputs:
            raise RuntimeError(f"vllm drew {sum(got)} tokens where {load.output_tokens} were asked for")
        return {"seed": load.seed, "seconds": seconds, "output_tokens_per_s": load.output_tokens / seconds}

    def _params(self, params: SamplingParams) -> Any:
        return self.vllm.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            max_tokens=params.max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
