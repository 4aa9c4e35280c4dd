"""How the benchmark's figures look: Markdown tables and the sentences below them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch

from speculative_ar.decoders import SamplerSettings

if TYPE_CHECKING:
    from benchmark_costs import Cost
    from benchmark_reference import Reference
    from benchmark_runs import Row, SweepRow

COST_COLUMNS = ("ms a pass", "ms bare", "total / bare", "host reads a pass", "peak MB", "roofline")
SWEEP_COLUMNS = ("forward passes", "seconds", "ms a token", *COST_COLUMNS)


def markdown(head: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    """A table whose columns line up."""
    lines = [head, tuple("---" for _ in head), *body]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(markdown_line(line, widths) for line in lines)


def markdown_line(cells: tuple[str, ...], widths: list[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def length(row: Row) -> str:
    """The positions of a pass: those of the main chain, and of its branches."""
    return str(row.draft_length) + (f" + {row.branches - 1}x{row.branch_length}" if row.branches > 1 else "")


def decoders(rows: list[Row]) -> str:
    """What each decoder saves."""
    head = ("decoder", "draft length", "promise", "forward passes", "draft passes", "fewer passes", "acceptance",
            "accepted per pass", "seconds", "total / model time")  # fmt: skip
    body = [
        (
            row.decoder, length(row), row.promise, f"{row.forward_passes:.1f}", f"{row.draft_passes:.0f}",
            f"{row.pass_reduction:.2f}x", f"{100 * row.acceptance_rate:.0f} %", f"{row.accepted_per_pass:.2f}",
            f"{row.seconds:.2f}", f"{row.overhead:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    return markdown(head, body)


def costs(rows: list[Row], bandwidth: float) -> str:
    """What a pass of each costs."""
    body = [(row.decoder, length(row), *cost_cells(row.cost)) for row in rows if row.cost]
    return f"{markdown(('decoder', 'draft length', *COST_COLUMNS), body)}\n\n{legend(bandwidth)}"


def cost_cells(cost: Cost) -> tuple[str, ...]:
    """The cells below COST_COLUMNS."""
    times = (f"{time:.2f}" for time in (cost.ms_per_pass, cost.bare_ms_per_pass, cost.bare_ratio))
    roofline = f"{100 * cost.roofline_share:.0f} %"
    return (*times, f"{cost.host_reads_per_pass:.2f}", f"{cost.peak_memory_mb:.1f}", roofline)


def legend(bandwidth: float) -> str:
    return (
        "Of the first pair. Bare: the same windows fed to the same session again, with nothing around them. Peak: "
        "what a run's tensors take at most, weights not counted.\nRoofline: the weights of a pass at the device's copy "
        f"bandwidth, measured as {bandwidth / 1e9:.0f} GB/s, over ms a pass."
    )


def reference(found: Reference, rows: list[Row]) -> str:
    """transformers' loop, and each row's part of its time."""
    parts = ", ".join(f"{row.decoder} {row.cost.ms_per_pass / found.ms_per_pass:.2f}" for row in rows if row.cost)
    return (
        "Reference: an SJD loop over transformers' Chameleon with a dynamic cache and all output rows, draft length "
        f"{found.draft_length}: {found.forward_passes} passes, {found.ms_per_pass:.1f} ms a pass. Of that time the "
        f"decoders take, each pass: {parts}."
    )


def sweep_head(name: str, settings: SamplerSettings) -> str:
    """The head of a sweep's table, whose rows are printed as they come."""
    head = (name.ljust(8), *SWEEP_COLUMNS)
    widths = [len(cell) for cell in head]
    fixed = "" if name == "window" else f", draft length {settings.draft_length}"
    rule = markdown_line(tuple("---" for _ in head), widths)
    return f"{settings.decoder}{fixed}:\n\n{markdown_line(head, widths)}\n{rule}"


def sweep_row(row: SweepRow) -> str:
    """One line of a sweep's table."""
    counts = (row.value, str(row.forward_passes), f"{row.seconds:.2f}", f"{row.ms_per_token:.2f}")
    return markdown_line((*counts, *cost_cells(row.cost)), [8, *map(len, SWEEP_COLUMNS)])


def conditions(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> str:
    """The settings of the whole run, as the last line."""
    chosen = (
        f"cfg {arguments.cfg:g}, temperature {arguments.temperature:g}, top-k {arguments.top_k}, "
        f"batch {arguments.batch}, {str(dtype).removeprefix('torch.')}, {device.type}"
    )
    over = "" if arguments.sweep else f"Means over {arguments.pairs} (label, seed) pairs; "
    return f"\n{over}{arguments.synthetic or 'demo model'}, {chosen}."
