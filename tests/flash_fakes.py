"""Stand-ins for the FlashAttention packages: signatures as published, results in float32 by definition, arguments checked.

`install` puts them on sys.path as distributions of the real names, so that finding and importing them is the real thing.
A tile of whole blocks is multiplied with its stale rows in it, as Hopper kernels do: 0 times NaN is NaN.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HEAD = "from tests import flash_fakes as fakes\n"
VLLM = "flash_attn_varlen_func, get_scheduler_metadata = fakes.vllm_varlen, fakes.metadata"
FILES = {
    "flash_attn_interface": {
        "flash_attn_interface.py": "flash_attn_with_kvcache, get_scheduler_metadata = fakes.fa3_with_kvcache, fakes.metadata",
    },
    "vllm.vllm_flash_attn": {
        "vllm/__init__.py": "",
        "vllm/vllm_flash_attn/__init__.py": VLLM,
        "vllm/vllm_flash_attn/_vllm_fa3_C.py": "",
    },
    "flash_attn": {
        "flash_attn/__init__.py": "flash_attn_varlen_func, flash_attn_with_kvcache = fakes.fa2_varlen, fakes.fa2_with_kvcache",
        "flash_attn/flash_attn_interface.py": "",
    },
    "flash_attn.cute": {
        "flash_attn/cute/__init__.py": "flash_attn_varlen_func = fakes.fa4_varlen",
        "flash_attn/cute/interface.py": "",
    },
}
VERSIONS = {
    "flash_attn_interface": ("flash_attn_3", "3.0.0b1"),
    "vllm.vllm_flash_attn": ("vllm", "0.24.0"),
    "flash_attn": ("flash_attn", "2.8.3"),
    "flash_attn.cute": ("flash_attn_4", "4.0.0"),
}


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str, broken: str = "") -> None:
    """`broken`: the package whose import fails."""
    for name in names:
        for path, text in FILES[name].items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            fails = name == broken and text
            file.write_text('raise OSError("libcudart.so not found")\n' if fails else f"{HEAD}{text}\n")
        distribution, version = VERSIONS[name]
        info = folder / f"{distribution}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))
    for module in [m for m in sys.modules if m.split(".")[0] in ("flash_attn_interface", "vllm", "flash_attn")]:
        monkeypatch.delitem(sys.modules, module)


def attend(q, keys, values, cu_q, lens, table, scale, causal, max_q, max_k, whole_blocks=False):
    """q [t, H, D] over [blocks, block_size, K, D]; bottom-right causal."""
    check(q, keys, values, cu_q, lens, table, max_q, max_k)
    assert causal and scale == q.shape[-1] ** -0.5
    out, block_size, group = torch.empty_like(q), keys.shape[1], q.shape[1] // keys.shape[2]
    for i, length in enumerate(lens.tolist()):
        rows = slice(int(cu_q[i]), int(cu_q[i + 1]))
        blocks = table[i, : -(-length // block_size)].long()
        k, v = (x[blocks].flatten(0, 1).float().repeat_interleave(group, 1) for x in (keys, values))
        count = rows.stop - rows.start
        hidden = torch.arange(len(k)) > torch.arange(length - count, length)[:, None]
        scores = torch.einsum("nhd,lhd->hnl", q[rows].float(), k) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        last = len(v) if whole_blocks else length
        out[rows] = torch.einsum("hnl,lhd->nhd", weights[..., :last], v[:last]).to(q.dtype)
    return out


def check(q, keys, values, cu_q, lens, table, max_q, max_k):
    """What the real functions demand of their arguments, and that the bounds are bounds."""
    assert cu_q.dtype == lens.dtype == table.dtype == torch.int32
    assert cu_q.is_contiguous() and lens.is_contiguous() and table.stride(-1) == 1
    assert keys.shape == values.shape and keys.is_contiguous() and values.is_contiguous() and q.stride(-1) == 1
    assert len(cu_q) == len(lens) + 1 == len(table) + 1 and cu_q[0] == 0 and cu_q[-1] == len(q)
    counts = cu_q.diff()
    assert counts.min() > 0 and (lens >= counts).all()
    assert isinstance(max_q, int) and max_q >= counts.max() and isinstance(max_k, int) and max_k >= lens.max()


def metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new=None,
    cache_leftpad=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """All that the real one depends on, so that a plan made for other arguments or lengths is found out."""
    assert len(cache_seqlens) == batch_size
    numbers = [batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, page_size, causal, num_splits]
    head = torch.tensor([*numbers, qkv_dtype.itemsize], dtype=torch.int32)
    return torch.cat((head, cache_seqlens, cu_seqlens_q))


def _fa3(q, keys, values, cu_q, lens, table, scale, causal, max_q, max_k, plan, splits):
    if plan is not None:
        sizes = q.shape[1], keys.shape[2], q.shape[2]
        want = metadata(
            len(lens),
            max_q,
            max_k,
            *sizes,
            lens,
            q.dtype,
            cu_seqlens_q=cu_q,
            page_size=keys.shape[1],
            causal=causal,
            num_splits=splits,
        )
        assert torch.equal(plan, want)
    whole = max_q > 1 and keys.shape[1] >= 64
    return attend(q, keys, values, cu_q, lens, table, scale, causal, max_q, max_k, whole)


def fa3_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table: Any = None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    bound = page_table.shape[1] * k_cache.shape[1]
    kv = cu_seqlens_q, cache_seqlens, page_table
    return _fa3(q, k_cache, v_cache, *kv, softmax_scale, causal, max_seqlen_q, bound, scheduler_metadata, num_splits)


def vllm_varlen(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=None,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    num_splits=0,
    output_scale=None,
    fa_version=2,
    s_aux=None,
):
    assert fa_version == 3 and cu_seqlens_k is None
    kv = cu_seqlens_q, seqused_k, block_table
    return _fa3(q, k, v, *kv, softmax_scale, causal, max_seqlen_q, max_seqlen_k, scheduler_metadata, num_splits)


def fa2_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert k.shape[1] % 256 == 0 and cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k[0] == 0
    lens = cu_seqlens_k.diff()
    return attend(q, k, v, cu_seqlens_q, lens, block_table, softmax_scale, causal, max_seqlen_q, max_seqlen_k)


def fa2_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table: Any = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    assert k_cache.shape[1] % 256 == 0 and q.dim() == 4 and q.shape[1] == 1
    cu_q = torch.arange(len(q) + 1, dtype=torch.int32)
    bound = block_table.shape[1] * k_cache.shape[1]
    return attend(q[:, 0], k_cache, v_cache, cu_q, cache_seqlens, block_table, softmax_scale, causal, 1, bound)[:, None]


def fa4_varlen(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    return_lse=False,
):
    assert num_splits == 1 and cu_seqlens_k is None
    whole, kv = k.shape[1] >= 64, (cu_seqlens_q, seqused_k, page_table)
    return attend(q, k, v, *kv, softmax_scale, causal, max_seqlen_q, max_seqlen_k, whole), None
