"""Shows the pack at work: makes an environment, starts a ComfyUI with the pack, queues a workflow, saves the picture,
and prints how many forward passes each decoder needed.

    python tools/demo.py            once, then everything that was started is stopped
    python tools/demo.py --serve    ComfyUI stays up until Ctrl-C, to be used in a browser
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import environment
from environment import ROOT, say

if TYPE_CHECKING:
    from comfyui import Server

OUTPUT = ROOT / "output"
WORKFLOWS = ROOT / "workflows"
QUICK_START = "quick_start"


def main() -> None:
    options = arguments()
    environment.enter(__file__, environment.DEMO)
    environment.on_request_to_end(lambda: sys.exit(environment.ENDED))
    run(options)


def run(options: argparse.Namespace) -> None:
    """The whole demonstration; whatever fails ends the program with one sentence."""
    from comfyui import StartError
    from comfyui_client import Refused
    from workflow import WorkflowError

    try:
        demonstrate(options)
    except StartError as error:
        sys.exit(f"demo.py: {error.reason}{kept(error.log)}")
    except Refused as error:
        sys.exit(f"demo.py: ComfyUI refused the workflow. {error}")
    except (OSError, WorkflowError) as error:
        sys.exit(f"demo.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def arguments() -> argparse.Namespace:
    workflows = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workflow", default=QUICK_START, choices=workflows, help=f"default: {QUICK_START}")
    parser.add_argument("--serve", action="store_true", help="leave ComfyUI running and print its address")
    parser.add_argument("--pairs", type=int, default=3, help="pictures that the table is a mean of, default 3")
    parser.add_argument("--port", type=int, default=0, help="ComfyUI's port (default: a free one)")
    return parser.parse_args()


def demonstrate(options: argparse.Namespace) -> None:
    from comfyui import PACK, Server

    OUTPUT.mkdir(exist_ok=True)
    say("starting ComfyUI with this pack")
    with Server(port=options.port, options=["--output-directory", str(OUTPUT)]) as server:
        say(f"queueing workflows/{options.workflow}.json")
        for picture in make_pictures(server, options.workflow):
            say(f"saved {picture.relative_to(ROOT)}")
        say("counting forward passes of every decoder on the bundled demo model")
        benchmark = [str(ROOT / "tools" / "benchmark.py"), "--quick", "--pairs", str(options.pairs)]
        if subprocess.run([sys.executable, *benchmark]).returncode:
            sys.exit("demo.py: the benchmark failed; what it printed above says why.")
        if options.serve:
            say(f"ComfyUI is at {server.url}/?template={options.workflow}&source={PACK} (Ctrl-C stops it)")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(1)  # Windows wakes a sleeping program for Ctrl-C alone, not for Ctrl-Break


def kept(log: str) -> str:
    """Writes what ComfyUI printed where it can be read, and says where; nothing for an empty log."""
    if not log:
        return ""
    file = OUTPUT / "comfyui.log"
    file.write_text(log, encoding="utf-8")
    return f" What it printed is in {file.relative_to(ROOT)}."


def make_pictures(server: Server, name: str) -> list[Path]:
    """Runs a workflow of this repository; returns the files that it saved."""
    from comfyui_client import Client
    from workflow import to_graph

    workflow = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    with Client(server.url) as client:
        graph = to_graph(workflow, client.object_info())
        run = client.until_done(client.queue(graph, workflow=workflow), on_event=Bar().show)
        if run.error:
            sys.exit(f"demo.py: the workflow failed: {run.error['exception_message']}")
    images = [image for shown in run.shown.values() for image in shown.get("images", [])]
    return [OUTPUT / image["subfolder"] / image["filename"] for image in images if image["type"] == "output"]


class Bar:
    """A node's progress as one line that grows."""

    WIDTH = 40

    def __init__(self) -> None:
        self.drawn = -1

    def show(self, event: dict[str, Any]) -> None:
        if event["type"] != "progress":
            return
        value, maximum = event["data"]["value"], event["data"]["max"]
        filled = self.WIDTH * value // maximum
        if filled > self.drawn:
            self.drawn = filled
            end = "\n" if value == maximum else ""
            print(f"\r  {'#' * filled:.<{self.WIDTH}} {value}/{maximum} tokens", end=end, flush=True)


if __name__ == "__main__":
    main()
