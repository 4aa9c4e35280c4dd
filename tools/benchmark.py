"""Measures the decoders: passes, acceptance, time, what a pass costs, and how much of that is the model.

    python tools/benchmark.py                                       the bundled demo model
    python tools/benchmark.py --synthetic lumina-80m                random weights in the shape of a bigger model
    python tools/benchmark.py --synthetic lumina-80m --sweep size   the cost against one setting
    python tools/benchmark.py --continuous                          the bundled pair of continuous models

Every figure of a table comes from one run, and for each (label, seed) pair all decoders run one after the other, so
that their ratios hold whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import environment

if __name__ == "__main__":
    environment.enter(__file__, environment.DEMO)

import torch

import benchmark_models
import benchmark_tables
from benchmark_costs import copy_bandwidth
from benchmark_models import SHAPES, Subject
from benchmark_runs import SWEEPS, Row, measure, sweep
from speculative_ar.decoders import DECODERS, ContinuousOptions, Decoder, DecoderOptions, SamplerSettings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DRAFT_LENGTHS = (16, 32, 64)
DRAFT_MODEL_LENGTHS = (4, 8, 16)  # each draft costs a pass of the small model: longer ones lose more than they save
PAIRS, SYNTHETIC_PAIRS, CONTINUOUS_PAIRS = 24, 3, 6
QUICK_PAIRS, QUICK_LENGTHS, QUICK_DRAFT_MODEL_LENGTHS = 3, (32,), (8,)


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    if arguments.continuous:
        continuous(arguments, device)
        return
    dtype = DTYPES[arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    if arguments.synthetic:
        subject = benchmark_models.synthetic(arguments.synthetic, SHAPES[arguments.synthetic], device, dtype)
    else:
        subject = benchmark_models.demo(device, dtype)
    try:
        found = (sweeps if arguments.sweep else decoders)(subject, arguments)
    except ValueError as error:  # settings that the model cannot meet, in a sentence
        sys.exit(f"benchmark.py: {error}")
    print(benchmark_tables.conditions(arguments, device, dtype))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"draft length {QUICK_LENGTHS[0]}, {QUICK_PAIRS} pairs, counts alone")
    add("--synthetic", choices=list(SHAPES), help="random weights of this shape (lumina-7b: for a GPU)")
    add(
        "--continuous",
        action="store_true",
        help="the models of continuous tokens; float32, other options: --pairs, --cfg",
    )
    add("--diffusion-steps", type=positive, default=100, help="--continuous: steps of a token, default 100")
    add(
        "--pictures",
        type=int,
        default=288,
        help="--continuous: pictures a row for its distance, 0 for none, default 288",
    )
    add("--sweep", action="append", choices=list(SWEEPS), help="the cost against this, in place of the decoders' table")
    add("--decoder", action="append", choices=list(DECODERS), help="measure this one beside ar")
    add("--draft-length", action="append", type=positive, metavar="W", help=f"default {DRAFT_LENGTHS}")
    add("--branches", type=positive, default=1, metavar="K", help="seed-exact also with K - 1 branches")
    add("--branch-length", type=positive, default=4, metavar="A", help="positions of each, default 4")
    add("--pairs", type=positive, help=f"(label, seed) pairs, default {PAIRS}, --synthetic {SYNTHETIC_PAIRS}")
    add("--batch", type=positive, default=1, help="pictures at a time, default 1")
    add("--cfg", type=float, default=2.0, help="guidance, default 2: what LlamaGen evaluates its B and L models with")
    add("--temperature", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--device", default="cpu", help="default cpu")
    add("--dtype", choices=list(DTYPES), help="default fp32, on CUDA bf16")
    add("--json", type=Path, metavar="FILE", help="also write the rows here")
    arguments = parser.parse_args()
    if "size" in (arguments.sweep or ()) and not arguments.synthetic:
        parser.error("the demo model draws one size only: --sweep size needs --synthetic")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU here: leave out --device, or use a CUDA build of torch")
    fewer = CONTINUOUS_PAIRS if arguments.continuous else SYNTHETIC_PAIRS if arguments.synthetic else PAIRS
    arguments.pairs = arguments.pairs or (QUICK_PAIRS if arguments.quick else fewer)
    return arguments


def positive(text: str) -> int:
    """An argument's whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def continuous(arguments: argparse.Namespace, device: torch.device) -> None:
    """Prints the table of the continuous models."""
    import benchmark_continuous

    steps = ContinuousOptions(diffusion_steps=arguments.diffusion_steps)
    base = SamplerSettings(guidance_scale=arguments.cfg, continuous=steps)
    rows = benchmark_continuous.measure(benchmark_continuous.demo(device), base, arguments.pairs, arguments.pictures)
    print(benchmark_continuous.table(rows))
    print(
        f"\nMeans over {arguments.pairs} pictures, distances over {arguments.pictures}; demo continuous, "
        f"cfg {arguments.cfg:g}, {arguments.diffusion_steps} diffusion steps, float32, {device.type}."
    )
    if arguments.json:
        arguments.json.write_text(json.dumps([row.to_json() for row in rows], indent=2), encoding="utf-8")


def settings_of(arguments: argparse.Namespace) -> SamplerSettings:
    return SamplerSettings(
        batch_size=arguments.batch,
        guidance_scale=arguments.cfg,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
    )


def decoders(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints the decoders' tables and returns what --json writes."""
    bandwidth = 0.0 if arguments.quick else copy_bandwidth(torch.device(arguments.device))
    rows = measure(subject, plan(arguments), arguments.pairs, bandwidth)
    print(benchmark_tables.decoders(rows))
    found: dict[str, Any] = {"rows": [row.to_json() for row in rows]}
    if arguments.quick:
        return found
    print("\n" + benchmark_tables.costs(rows, bandwidth))
    if arguments.synthetic and SHAPES[arguments.synthetic].has_reference and arguments.batch == 1:
        found["reference"] = [reference(subject, length, rows, arguments) for length in lengths_in(rows)]
    return found


def plan(arguments: argparse.Namespace) -> list[SamplerSettings]:
    """What to run for each pair, ar first."""
    base = settings_of(arguments)
    planned = []
    for name, decoder in DECODERS.items():
        if arguments.decoder and name not in ("ar", *arguments.decoder):
            continue
        for length in lengths_of(decoder, arguments):
            settings = replace(base, decoder=name, draft_length=length)
            planned.append(settings)
            if decoder.follows_branches and arguments.branches > 1:
                branched = DecoderOptions(branches=arguments.branches, branch_length=arguments.branch_length)
                planned.append(replace(settings, options=branched))
    return planned


def lengths_of(decoder: Decoder, arguments: argparse.Namespace) -> tuple[int, ...]:
    """The draft lengths that a decoder is measured at."""
    if not decoder.speculative:
        return (1,)
    if arguments.draft_length:
        return tuple(arguments.draft_length)
    if decoder.needs_draft_model:
        return QUICK_DRAFT_MODEL_LENGTHS if arguments.quick else DRAFT_MODEL_LENGTHS
    return QUICK_LENGTHS if arguments.quick else DRAFT_LENGTHS


def lengths_in(rows: list[Row]) -> list[int]:
    """The draft lengths that decoders with a Jacobi window were measured at."""
    return sorted({row.draft_length for row in rows if row.decoder not in ("ar", "draft-model")})


def reference(subject: Subject, length: int, rows: list[Row], arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs transformers' model with one draft length; prints how the rows compare."""
    import benchmark_reference

    print(f"running transformers' Chameleon at draft length {length}", end="\r", file=sys.stderr, flush=True)
    found = benchmark_reference.run(subject.target, subject.conditions[0][1], length, arguments.cfg)
    print("\n" + benchmark_tables.reference(found, [row for row in rows if row.draft_length == length]))
    return asdict(found)


def sweeps(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    """Prints a table for each sweep that was asked for, row by row, and returns what --json writes."""
    bandwidth = copy_bandwidth(torch.device(arguments.device))
    found: dict[str, list[dict[str, Any]]] = {}
    for name in arguments.sweep:
        found[name] = []
        for decoder in arguments.decoder or ["seed-exact"]:
            base = replace(settings_of(arguments), decoder=decoder)
            if arguments.draft_length:
                base = replace(base, draft_length=arguments.draft_length[0])
            print(benchmark_tables.sweep_head(name, base))
            for row in sweep(subject, name, base, bandwidth):
                print(benchmark_tables.sweep_row(row), flush=True)
                found[name].append(row.to_json())
            print()
    return {"sweeps": found}


if __name__ == "__main__":
    main()
