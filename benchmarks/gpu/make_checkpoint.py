"""A Hugging Face directory with random weights: the real configuration of a preset, no tokenizer.

    python -m benchmarks.gpu.make_checkpoint qwen3-0.6b DIRECTORY [--seed 0] [--shard-gb 4]

Matrices are N(0, 0.02), norm weights 1, in bfloat16; drawn on the GPU if there is one (numbers differ from a CPU's).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from core import device
from core.config import compose
from core.interfaces import DeviceContext, Limits
from core.parallel import Solo
from plugins.models.llama import Llama
from plugins.models.qwen3 import Qwen3

ARCHITECTURES = {"Qwen3ForCausalLM": Qwen3, "LlamaForCausalLM": Llama}
Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(config: dict[str, Any]) -> Shapes:
    """Name and shape of every tensor, from a model without memory."""
    context = DeviceContext(
        Limits(1, 1, 8), torch.device("meta"), torch.bfloat16, config, config["vocab_size"], Solo(), block_size=16
    )
    return ARCHITECTURES[config["architectures"][0]](None, context).weights()


def shards(shapes: Shapes, limit: int) -> Iterator[list[str]]:
    """Names in order, cut where `limit` bytes would be passed."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        bytes_of_it = 2 * math.prod(shape)
        if names and size + bytes_of_it > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += bytes_of_it
    yield names


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1 and name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    values = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return values.normal_(0.0, 0.02, generator=generator).cpu()


def write(config: dict[str, Any], folder: Path, seed: int, limit: int) -> int:
    """Bytes written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    shapes, generator = shapes_of(config), torch.Generator(device.pick("auto")).manual_seed(seed)
    groups, where = list(shards(shapes, limit)), {}
    for i, names in enumerate(groups):
        file = "model.safetensors" if len(groups) == 1 else f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
        save_file({name: draw(name, shapes[name], generator) for name in names}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", help="of conf/model: qwen3-0.6b, qwen3-8b, qwen3-14b, tiny-llama, ...")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-gb", type=float, default=4.0)
    args = parser.parse_args()
    config = compose([f"model={args.preset}"]).config.model.config
    if not config:
        parser.error(f"{args.preset} names no configuration; take a preset such as qwen3-0.6b")
    config = {**config, "torch_dtype": "bfloat16"}
    started = time.perf_counter()
    size = write(config, args.folder, args.seed, int(args.shard_gb * 1e9))
    print(f"{args.folder}: {size / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
