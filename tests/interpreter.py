"""Import this before triton: on a machine without a GPU, Triton kernels then run in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import triton.runtime.interpreter as interpreter  # noqa: E402

assert DEVICE == "cuda" or interpreter.triton.knobs.runtime.interpret, "triton was imported before this module"  # type: ignore[attr-defined]
_patch_before = interpreter._patch_lang_tensor


def _patch(tensor, scope) -> None:
    """A loaded scalar is an array of one element there: NumPy 2.4 and later refuse to make an index of it."""
    _patch_before(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch
