"""The real page in a real browser: a workflow file is dropped, widgets follow the decoder, Run brings a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import comfyui
from comfyui_client import Client
from workflow import to_graph

SCREENSHOTS = comfyui.ROOT / "output"
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--force-color-profile=srgb", "--hide-scrollbars"),
]
READY = """() => window.app?.graph && window.app.extensionManager && window.LiteGraph
    && 'SpecARSampler' in LiteGraph.registered_node_types"""
DROP = "async ([text, name]) => app.handleFile(new File([text], name, {type: 'application/json'}))"
CHOOSE = """([node, name, value]) => { const owner = app.graph.getNodeById(node);
    const widget = owner.widgets.find(w => w.name === name);
    widget.value = value; widget.callback?.(value, app.canvas, owner); }"""
VISIBLE_ON_CANVAS = """(id) => { const node = app.graph.getNodeById(id);
    return node.widgets.filter(w => node.isWidgetVisible ? node.isWidgetVisible(w) : !w.hidden).map(w => w.name); }"""
VISIBLE_IN_VUE = """(id) => [...document.querySelectorAll(`[data-node-id="${id}"] .lg-node-widget`)]
    .filter(e => e.offsetParent !== null && e.getBoundingClientRect().height > 0)
    .map(e => e.innerText.split('\\n')[0].trim())"""
PANEL = "() => document.querySelector('.speculativear-panel')?.textContent ?? ''"


class Desk:
    """An open page, with every error that names our extension."""

    def __init__(self, page: Page, server: comfyui.Server) -> None:
        self.page, self.server = page, server
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self._keep(f"{error}\n{error.stack}"))
        page.on(
            "console",
            lambda message: self._keep(f"{message.text} {message.location}") if message.type == "error" else None,
        )
        page.goto(server.url, wait_until="domcontentloaded")
        page.wait_for_function(READY, timeout=120_000)
        page.wait_for_timeout(1500)

    def _keep(self, text: str) -> None:
        if f"/extensions/{comfyui.PACK}/" in text:
            self.errors.append(text)

    def open(self, path: Path) -> int:
        """Drops a workflow file; returns the sampler's id."""
        return self.drop(path.read_text(encoding="utf-8"), path.name)

    def drop(self, text: str, name: str) -> int:
        """As `open`, for the content of a file."""
        self.page.evaluate(DROP, [text, name])
        sampler = next(node["id"] for node in json.loads(text)["nodes"] if node["type"] == "SpecARSampler")
        self.page.wait_for_function("(id) => app.graph.getNodeById(id)?.type === 'SpecARSampler'", arg=sampler)
        self.page.keyboard.press("Escape")
        self.page.evaluate(
            "() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [40, 20]; app.canvas.setDirty(true, true); }"
        )
        self.page.wait_for_timeout(800)
        return sampler

    def choose(self, node: int, widget: str, value: Any) -> None:
        self.page.evaluate(CHOOSE, [node, widget, value])
        self.page.wait_for_timeout(400)

    def graph(self) -> dict[str, Any]:
        """What the page would queue."""
        output = self.page.evaluate("async () => (await app.graphToPrompt()).output")
        return {node: {key: entry[key] for key in ("class_type", "inputs")} for node, entry in output.items()}

    def visible(self, node: int) -> list[str]:
        return self.page.evaluate(VISIBLE_ON_CANVAS, node)


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def page_of_this_file(server: comfyui.Server, browser: Browser) -> Desk:
    return Desk(browser.new_page(viewport={"width": 1500, "height": 760}), server)


@pytest.fixture
def desk(page_of_this_file: Desk) -> Iterator[Desk]:
    """The page, which all tests share; each must leave it without an error of ours."""
    yield page_of_this_file
    errors, page_of_this_file.errors = page_of_this_file.errors, []
    assert errors == []


@pytest.mark.parametrize("path", sorted((comfyui.ROOT / "workflows").glob("*.json")), ids=lambda path: path.stem)
def test_the_page_queues_what_the_file_says(desk: Desk, client: Client, path: Path):
    desk.open(path)
    assert desk.graph() == to_graph(json.loads(path.read_text(encoding="utf-8")), client.object_info())


@pytest.mark.parametrize("name", ["quick_start", "draft_model"])
def test_a_file_from_before_a_widget_existed_still_opens(desk: Desk, client: Client, name: str):
    """Inputs are only ever added at a node's end, where a shorter list of stored values leaves the default."""
    path = comfyui.ROOT / "workflows" / f"{name}.json"
    workflow = json.loads(path.read_text(encoding="utf-8"))
    loaders = [node for node in workflow["nodes"] if node["type"].startswith("SpecARLoad")]
    for node in loaders:
        assert node["inputs"].pop()["name"] == "picture_size"
        assert node["widgets_values"].pop() == 0
    desk.drop(json.dumps(workflow), path.name)
    assert len(loaders) == (2 if name == "draft_model" else 1)
    assert desk.graph() == to_graph(json.loads(path.read_text(encoding="utf-8")), client.object_info())


def test_only_the_widgets_that_the_decoder_uses_are_shown(desk: Desk):
    sampler = desk.open(comfyui.ROOT / "workflows" / "quick_start.json")
    assert "draft_length" in desk.visible(sampler)
    height = desk.page.evaluate("(id) => app.graph.getNodeById(id).size[1]", sampler)
    desk.choose(sampler, "draft_length", 48)
    desk.choose(sampler, "decoder", "ar")
    assert "draft_length" not in desk.visible(sampler)
    assert "temperature" in desk.visible(sampler)
    assert desk.page.evaluate("(id) => app.graph.getNodeById(id).size[1]", sampler) < height
    assert "reference" in desk.page.evaluate(PANEL)
    assert desk.graph()[str(sampler)]["inputs"]["draft_length"] == 48, "a hidden widget keeps its value"
    desk.choose(sampler, "decoder", "gsd")
    assert "draft_length" in desk.visible(sampler)
    assert "approximate" in desk.page.evaluate(PANEL)
    assert desk.graph()[str(sampler)]["inputs"]["draft_length"] == 48


def test_the_panel_is_no_part_of_the_saved_file(desk: Desk):
    path = comfyui.ROOT / "workflows" / "quick_start.json"
    sampler = desk.open(path)
    stored = next(node for node in json.loads(path.read_text(encoding="utf-8"))["nodes"] if node["id"] == sampler)
    saved = desk.page.evaluate("(id) => app.graph.serialize().nodes.find(n => n.id === id).widgets_values", sampler)
    assert saved == stored["widgets_values"]
    assert "speculativear_panel" not in desk.graph()[str(sampler)]["inputs"]


def test_the_options_node_hides_what_its_verifier_ignores(desk: Desk):
    desk.open(comfyui.ROOT / "workflows" / "quick_start.json")
    node = desk.page.evaluate(
        "() => { const n = LiteGraph.createNode('SpecARDecoderOptions'); app.graph.add(n); return n.id; }"
    )
    assert "group_size" in desk.visible(node)
    desk.choose(node, "verify", "exact")
    assert "group_size" not in desk.visible(node)
    assert {"redraft", "verify", "initialise"} <= set(desk.visible(node))


def test_run_brings_live_numbers_and_the_picture(desk: Desk, client: Client):
    sampler = desk.open(comfyui.ROOT / "workflows" / "quick_start.json")
    desk.choose(sampler, "decoder", "ar")
    before = set(client.get("/history"))
    desk.page.locator('[data-testid="queue-button"]').first.click()
    desk.page.wait_for_function(
        "() => / of [0-9]+ tokens/.test(document.querySelector('.speculativear-panel').textContent)"
    )
    desk.page.screenshot(path=SCREENSHOTS / "page-running.png")
    desk.page.wait_for_function(
        "() => /^ar .reference.*passes for/.test(document.querySelector('.speculativear-panel').textContent)",
        timeout=120_000,
    )
    desk.page.wait_for_function(
        "() => app.graph.nodes.some(n => n.type === 'SaveImage' && n.imgs?.length)", timeout=60_000
    )
    desk.page.wait_for_timeout(500)
    desk.page.screenshot(path=SCREENSHOTS / "page-done.png")
    (new,) = set(client.get("/history")) - before
    assert client.history(new)["status"]["status_str"] == "success"
    assert client.images(new)


@pytest.mark.parametrize("fault", ["setTimeout(() => { throw new Error('of ours'); })", "console.error('of ours')"])
def test_an_error_of_ours_would_be_noticed_and_others_are_not(page_of_this_file: Desk, fault: str):
    for pack, noticed in (("another-pack", 0), (comfyui.PACK, 1)):
        source = f"{page_of_this_file.server.url}/extensions/{pack}/script.js"
        page_of_this_file.page.evaluate("(code) => { (0, eval)(code); }", f"{fault}; //# sourceURL={source}")
        page_of_this_file.page.wait_for_timeout(300)
        assert len(page_of_this_file.errors) == noticed
    page_of_this_file.errors.clear()


def test_the_vue_renderer_shows_the_nodes(browser: Browser):
    """Nodes 2.0 with the oldest page that we support, which looks for hidden widgets only when a file is opened."""
    with comfyui.Server(settings={"Comfy.VueNodes.Enabled": True}) as server:
        desk = Desk(browser.new_page(viewport={"width": 1500, "height": 900}), server)
        sampler = desk.open(comfyui.ROOT / "workflows" / "quick_start.json")
        labels = desk.page.evaluate(VISIBLE_IN_VUE, sampler)
        assert {"decoder", "draft_length", "batch_size"} <= set(labels)
        assert "auto" in desk.page.evaluate(PANEL)
        desk.page.screenshot(path=SCREENSHOTS / "page-vue.png")
        assert desk.errors == []
