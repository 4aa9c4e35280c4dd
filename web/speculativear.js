// The page's side of the nodes: it hides the widgets that a choice does not use, and shows live numbers on the sampler.
// Which widgets those are comes from Python with the node's description; without this file everything still works.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const SAMPLER = "SpecARSampler";
const PANEL_HEIGHT = 54;
const panels = new WeakMap();

// Choosers are dropdowns whose description carries `speculativear_widgets`: {value: [names of the widgets it uses]}.
function choosers(node) {
  const described = { ...node.constructor.nodeData?.input?.required };
  return Object.entries(described).filter(([, [, details]]) => details?.speculativear_widgets);
}

function setHidden(widget, hidden) {
  widget.hidden = hidden; // canvas renderer
  if (widget.options) widget.options.hidden = hidden; // Vue renderer
  if (hidden) widget.computeSize = () => [0, -4]; // canvas renderers of 2025 leave a gap without it
  else delete widget.computeSize;
}

function applyVisibility(node) {
  let changed = false;
  for (const [name, [, { speculativear_widgets: uses }]] of choosers(node)) {
    const shown = uses[node.widgets.find((widget) => widget.name === name)?.value];
    if (!shown) continue; // an unknown value: leave every widget visible
    const managed = new Set(Object.values(uses).flat());
    for (const widget of node.widgets) {
      const hidden = !shown.includes(widget.name);
      if (!managed.has(widget.name) || (!!widget.hidden === hidden && !!widget.options?.hidden === hidden)) continue;
      setHidden(widget, hidden);
      changed = true;
    }
  }
  if (!changed) return;
  node.widgets = [...node.widgets]; // the Vue renderer looks again when the list is another one
  node.setSize([node.size[0], node.computeSize()[1]]);
  node.graph?.setDirtyCanvas(true, true);
}

function chain(object, method, after) {
  const before = object[method];
  object[method] = function (...args) {
    const result = before?.apply(this, args);
    after(...args);
    return result;
  };
}

function addPanel(node) {
  const text = document.createElement("div");
  text.className = "speculativear-panel";
  text.style.cssText =
    "font: 12px sans-serif; line-height: 1.35; padding: 4px 6px; color: var(--input-text); overflow: hidden; user-select: text";
  const widget = node.addDOMWidget("speculativear_panel", "speculativear_panel", text, {
    serialize: false,
    hideOnZoom: false,
    margin: 4,
    getMinHeight: () => PANEL_HEIGHT,
    getMaxHeight: () => PANEL_HEIGHT,
    getValue: () => "",
  });
  widget.serialize = false; // keeps it out of the saved file
  panels.set(node, text);
}

function showSummary(node) {
  const decoder = node.widgets.find((widget) => widget.name === "decoder");
  const summaries = node.constructor.nodeData.input.required.decoder[1].speculativear_summaries;
  panels.get(node).textContent = summaries[decoder.value] ?? "";
}

function showProgress(node, { accepted, positions, pictures, forward_passes: passes, seconds }) {
  const each = passes ? `, ${(accepted / pictures / passes).toFixed(1)} tokens a pass` : "";
  panels.get(node).textContent = `${accepted} of ${positions} tokens, ${passes} passes${each}, ${seconds.toFixed(1)} s`;
}

function showStatistics(node, statistics) {
  const parts = [
    `${statistics.decoder} (${statistics.promise}): ${statistics.forward_passes} passes for ${statistics.positions} tokens`,
    `${statistics.pass_reduction.toFixed(1)} tokens a pass`,
  ];
  if (statistics.drafted) parts.push(`${Math.round(100 * statistics.acceptance_rate)} % of drafts kept`);
  if (statistics.draft_passes) parts.push(`${statistics.draft_passes} draft passes`);
  if (statistics.streamed) parts.push("weights streamed");
  parts.push(`${statistics.seconds.total.toFixed(1)} s`);
  panels.get(node).textContent = parts.join(", ");
}

// "3", or "5:3" for node 3 of the subgraph that node 5 stands for.
function findNode(executionId) {
  let graph = app.rootGraph ?? app.graph;
  let node = null;
  for (const part of String(executionId).split(":")) {
    node = graph?.getNodeById(Number(part)) ?? graph?.getNodeById(part);
    graph = node?.subgraph;
  }
  return node;
}

app.registerExtension({
  name: "speculativear.nodes",
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith("SpecAR")) return;
    for (const [name] of choosers(node)) {
      const widget = node.widgets.find((candidate) => candidate.name === name);
      chain(widget, "callback", () => applyVisibility(node));
    }
    if (choosers(node).length) {
      chain(node, "onConfigure", () => applyVisibility(node));
      applyVisibility(node);
    }
    if (node.comfyClass !== SAMPLER) return;
    addPanel(node);
    showSummary(node);
    chain(node, "onConfigure", () => showSummary(node));
    chain(node.widgets.find((widget) => widget.name === "decoder"), "callback", () => showSummary(node));
    chain(node, "onExecuted", (output) => {
      if (output?.speculativear) showStatistics(node, output.speculativear[0]);
    });
  },
  setup() {
    api.addEventListener("speculativear.progress", ({ detail }) => {
      const node = findNode(detail.node);
      if (panels.has(node)) showProgress(node, detail);
    });
  },
});
