"""Loading takes at most the memory of the loaded weights and of one shard, in the precision that is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.model_loaders.janus import OFFICIAL, SIZE

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no getrusage")
MEBIBYTE = 2**20
LAYERS, WIDTH, FFN, VOCABULARY, SHARDS = 10, 1024, 2816, 4096, 5

MEASURE = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tools!r})
import pack
pack.register()
import torch
from speculative_ar import model_loaders

def peak():
    status = Path("/proc/self/status")
    if status.is_file():  # Linux counts in getrusage what the process was before it became this program
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if "VmHWM" in line)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

model_loaders.load({tiny!r}, overrides={size!r})  # what the first load of all takes is no matter
before = peak()
model = model_loaders.load({folder!r}, dtype={dtype}, with_vq=False)
print(peak() - before, sum(weight.nbytes for weight in model.network.parameters()))
"""


def shapes() -> dict[str, tuple[int, ...]]:
    """The names of the official Janus, with an understanding that is larger than a shard."""
    result: dict[str, tuple[int, ...]] = {
        "vision_model.vision_tower.weight": (32 * WIDTH, WIDTH),
        "gen_embed.weight": (512, 8),
        "gen_aligner.layers.0.weight": (WIDTH, 8),
        "gen_aligner.layers.2.weight": (WIDTH, WIDTH),
        "gen_head.output_mlp_projector.weight": (WIDTH, WIDTH),
        "gen_head.vision_head.weight": (512, WIDTH),
        "language_model.model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "language_model.model.norm.weight": (WIDTH,),
        "language_model.lm_head.weight": (VOCABULARY, WIDTH),
    }
    for name in [name for name in result if name.startswith(("gen_aligner", "gen_head"))]:
        result[name.replace("weight", "bias")] = result[name][:1]
    for layer in range(LAYERS):
        prefix = f"language_model.model.layers.{layer}"
        result |= {f"{prefix}.self_attn.{side}_proj.weight": (WIDTH, WIDTH) for side in "qkvo"}
        result |= {f"{prefix}.mlp.{side}_proj.weight": (FFN, WIDTH) for side in ("gate", "up")}
        result[f"{prefix}.mlp.down_proj.weight"] = (WIDTH, FFN)
        result |= {f"{prefix}.{norm}_layernorm.weight": (WIDTH,) for norm in ("input", "post_attention")}
    return result


def write(folder: Path, suffix: str, dtype: torch.dtype) -> int:
    """A checkpoint in shards of about equal size, cut wherever the size says so; returns the size of the largest."""
    files: dict[str, str] = {}
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes().items()}
    for name in sorted(sizes):  # which puts query, key and value of some layers into different shards
        shard = sum(sizes[other] for other in files) * SHARDS // sum(sizes.values())
        files[name] = f"model-{shard + 1:05d}-of-{SHARDS:05d}.{suffix}"
    for file in set(files.values()):
        weights = {name: torch.full(shapes()[name], 0.01, dtype=dtype) for name in files if files[name] == file}
        (save_file if suffix == "safetensors" else torch.save)(weights, folder / file)
    (folder / f"model.{suffix}.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps({"language_config": {"num_attention_heads": 16}}))
    return max((folder / file).stat().st_size for file in files.values())


def measured(folder: Path, dtype: torch.dtype | None) -> tuple[int, int]:
    """Loads in a process of its own -> bytes by which its memory grew at most, bytes of the loaded weights."""
    program = MEASURE.format(
        tools=str(Path(__file__).parents[2] / "tools"),
        tiny=str(OFFICIAL),
        size=SIZE,
        folder=str(folder),
        dtype=dtype,
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    grown, target = map(int, result.stdout.split())
    return grown, target


@pytest.mark.parametrize(
    "suffix, stored, asked",
    [
        ("bin", torch.bfloat16, None),
        ("safetensors", torch.bfloat16, None),
        ("safetensors", torch.float32, torch.bfloat16),
    ],
)
def test_peak(suffix: str, stored: torch.dtype, asked: torch.dtype | None) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest would keep these for three more runs
        shard = write(Path(folder), suffix, stored)
        grown, target = measured(Path(folder), asked)
    assert target > 100 * MEBIBYTE
    assert target * 0.9 < grown <= target + shard, f"{grown / MEBIBYTE:.0f} MiB for {target / MEBIBYTE:.0f} MiB"
