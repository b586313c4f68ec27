"""Kernels on mixing matrices and their gradients: between blocks and runs of places, and sums over the batch.

H heads, M blocks; runs as in ``triton_pairwise.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expand_runs_kernel(
    mixing, weights, blocks, runs, padded, mixing_h, mixing_i, mixing_j, TILE: tl.constexpr
):  # fmt: skip
    """Mixing weights of each pair of runs: [H, M, M] -> [H, padded, padded]."""
    tiles = tl.cdiv(padded, TILE)
    row = tl.program_id(0) // tiles % tiles * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    head = tl.program_id(0) // tiles // tiles
    row_block = tl.load(blocks + row, mask=row < runs, other=0)
    column_block = tl.load(blocks + column, mask=column < runs, other=0)
    p_mixing = mixing + head * mixing_h + row_block[:, None] * mixing_i + column_block[None, :] * mixing_j
    p_weights = weights + (head * padded + row[:, None]) * padded + column[None, :]
    tl.store(p_weights, tl.load(p_mixing), mask=(row < padded)[:, None] & (column < padded)[None, :])


@triton.jit
def fold_runs_kernel(d_weights, d_mixing, blocks, runs, height, width, M, TILE: tl.constexpr, BM: tl.constexpr):
    """Sums over the runs of each pair of blocks: [H, height, width] -> [H, M, M], in float32."""
    tiles = tl.cdiv(M, BM)
    first = tl.program_id(0) // tiles % tiles * BM + tl.arange(0, BM)
    second = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    head = tl.program_id(0) // tiles // tiles
    total = tl.zeros((BM, BM), tl.float32)
    for row in range(0, runs, TILE):
        row_run = row + tl.arange(0, TILE)
        row_block = tl.load(blocks + row_run, mask=row_run < runs, other=-1)
        by_row = (first[:, None] == row_block[None, :]).to(tl.float32)
        for column in range(0, runs, TILE):
            column_run = column + tl.arange(0, TILE)
            column_block = tl.load(blocks + column_run, mask=column_run < runs, other=-1)
            by_column = (column_block[:, None] == second[None, :]).to(tl.float32)
            pointers = d_weights + (head * height + row_run[:, None]) * width + column_run[None, :]
            values = tl.load(pointers, mask=(row_run < runs)[:, None] & (column_run < runs)[None, :], other=0.0)
            rows = tl.dot(by_row, values, input_precision="ieee")
            total = tl.dot(rows, by_column, total, input_precision="ieee")
    pointers = d_mixing + (head * M + first[:, None]) * M + second[None, :]
    tl.store(pointers, total, mask=(first < M)[:, None] & (second < M)[None, :])


@triton.jit
def sum_rows_kernel(x, out, rows, columns, share, BR: tl.constexpr, BC: tl.constexpr):
    """Sums over rows of a float32 matrix, one share of the rows at a time: [rows, columns] -> [shares, columns]."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    first = tl.program_id(1) * share
    end = min(first + share, rows)
    total = tl.zeros((BR, BC), tl.float32)
    for row in range(first, end, BR):
        place = row + tl.arange(0, BR)
        pointers = x + place[:, None].to(tl.int64) * columns + column[None, :]
        total += tl.load(pointers, mask=(place < end)[:, None] & (column < columns)[None, :], other=0.0)
    tl.store(out + tl.program_id(1).to(tl.int64) * columns + column, tl.sum(total, 0), mask=column < columns)
