"""Sums whose bits do not depend on how the work was spread: the gradient tree and the norm.

Knows flat float32 vectors only; neither processes nor parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 65536  # elements of one norm block; a power of two
CHUNK = 64  # blocks squared at a time: 32 MiB of float64


def tree_sum(leaf: Callable[[int], Tensor], count: int) -> Tensor:
    """Sum of leaf(0) .. leaf(count - 1), added along a fixed binary tree.

    A node over n leaves adds its first ceil(n/2) leaves and the rest; the shape depends on `count`
    alone, so complete subtrees can be summed elsewhere with the same bits. leaf(i) returns a float32
    tensor that it gives away: it is overwritten, and must not share memory with another leaf's.
    Leaves are asked for in order, each once, depth first, so that at most ceil(log2(count)) + 1 of
    them live at a time.

    RuntimeError: a leaf with another shape or dtype, or one that reuses a buffer still in the sum.
    """
    assert count >= 1, f"a tree needs a leaf, not {count}"
    with torch.no_grad():
        return _subtree(leaf, 0, count)


def _subtree(leaf: Callable[[int], Tensor], start: int, stop: int) -> Tensor:
    if stop - start == 1:
        tensor = leaf(start)
        if tensor.dtype != torch.float32:
            raise RuntimeError(f"gradient {start} is {tensor.dtype}: the tree adds float32")
        return tensor
    middle = start + (stop - start + 1) // 2
    left = _subtree(leaf, start, middle)
    right = _subtree(leaf, middle, stop)
    if left.shape != right.shape:
        raise RuntimeError(f"gradients {start} and {middle} have shapes {tuple(left.shape)} and {tuple(right.shape)}")
    if left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr():
        raise RuntimeError(f"gradients {start} and {middle} share memory: each leaf must own its buffer")
    return left.add_(right)


def block_squares(flat: Tensor, block: int = BLOCK) -> Tensor:
    """Sum of squares of each block of a flat float32 vector [N]: float64 [ceil(N / block)].

    A block is added up by halving it elementwise (second half onto the first, log2(block) times).
    `Tensor.sum` is not used: beyond 32768 elements it splits the work by the number of threads,
    and on a GPU by the launch shape, and its bits follow. Elementwise float64 operations have one
    result everywhere, so a block's value depends on its elements alone, and vectors cut at block
    boundaries give the same blocks. The last block is filled up with zeros.
    """
    assert block > 0 and block & (block - 1) == 0, f"block {block} must be a power of two"
    assert flat.dim() == 1, f"flat vector expected, not {tuple(flat.shape)}"
    parts = []
    for start in range(0, flat.numel(), block * CHUNK):
        values = flat[start : start + block * CHUNK].detach().double()
        values = torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block).square_()
        width = block
        while width > 1:
            width //= 2
            values = values[:, :width] + values[:, width : 2 * width]
        parts.append(values[:, 0])
    return torch.cat(parts) if parts else flat.new_zeros(0, dtype=torch.float64)


def squared_norm(flat: Tensor, block: int = BLOCK) -> float:
    """Sum of squares of a flat float32 vector, float64; NaN or inf if an element is.

    The block sums are added with `math.fsum`, which rounds once and so knows no order: processes
    that own whole blocks can exchange them and get this number whatever their number.
    """
    return math.fsum(block_squares(flat, block).tolist())
