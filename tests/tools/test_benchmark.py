"""tools/benchmark.py as a user calls it: a table on the screen, and the rows as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_quick_run_writes_the_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "tools/benchmark.py", "--quick", "--decoder", "seed-exact", "--json", str(file)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ar, exact = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert (ar["decoder"], ar["forward_passes"], ar["pass_reduction"]) == ("ar", 256, 1)
    assert (exact["decoder"], exact["draft_length"], exact["promise"]) == ("seed-exact", 32, "seed-exact")
    assert exact["forward_passes"] < 200
    assert 0 < exact["acceptance_rate"] < 1
    assert exact["seconds"] > 0 and exact["overhead"] >= 1
    assert f"{exact['pass_reduction']:.2f}x" in output
