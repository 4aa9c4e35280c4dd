"""Rotary tables: the angles by which a position turns queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def line_rotary_table(positions: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """The usual table of text models: (cos, sin), each float32 [positions, head_dim / 2]."""
    frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(positions)[:, None] * frequencies
    return angles.cos(), angles.sin()


def grid_rotary_table(
    rows: int, columns: int, head_dim: int, base: float, prefix: int, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """LlamaGen's 2-D table: (cos, sin), each float32 [prefix + rows * columns + padding, head_dim / 2].

    The first half of the channel pairs turns by the row, the second by the column. Prefix slots hold zeros in cos as
    well as in sin, which blanks the queries and keys of condition rows: the released weights were trained that way.
    Padding slots (window positions past the end of the picture) repeat the last cell; nothing reads their result.
    """
    quarter = head_dim // 4
    frequencies = 1.0 / base ** (torch.arange(quarter, dtype=torch.float32) * 4 / head_dim)
    cell = torch.arange(rows * columns + padding).clamp(max=rows * columns - 1)
    row_angles = (cell // columns)[:, None] * frequencies
    column_angles = (cell % columns)[:, None] * frequencies
    angles = torch.cat((row_angles, column_angles), dim=-1)
    blank = torch.zeros(prefix, 2 * quarter)
    return torch.cat((blank, angles.cos())), torch.cat((blank, angles.sin()))
