// The stage: boxes as elements, edges as one drawing.

const SVG = "http://www.w3.org/2000/svg";
const MOST_VISIBLE = 1500;
const stage = document.getElementById("stage"), sizer = document.getElementById("sizer"), world = document.getElementById("world");

function linksOf(leaves, pairs) {
  const links = new Map();
  const shown = leaves.map(shownInstead);
  for (const [from, to, value] of pairs) {
    let source = shown[from], target = shown[to];
    if (source === target) continue;
    if (source.step && target.step && source.step !== target.step) {
      // What one step leaves for another (all that a backward needs) would fill the picture: one line from step to step.
      [source, target] = [source.step, target.step];
    }
    const key = source.id * 1e7 + target.id;
    if (!links.has(key)) links.set(key, { source, target, values: new Set() });
    links.get(key).values.add(value);
  }
  return [...links.values()];
}

function toneOf(box) {
  if (state.colour === "phase" || state.colour === "residency") {
    const [name] = [...box.tally[state.colour]].sort((a, b) => b[1] - a[1])[0] || ["unknown"];
    return tone(state.colour, name);
  }
  // Six powers of ten below the largest operation there is nothing to see.
  const share = box[state.colour] > 0 ? Math.max(0, 1 + Math.log10(Math.min(1, box[state.colour] / data.most[state.colour])) / 6) : 0;
  return `color-mix(in oklab, var(--heat) ${Math.round(100 * share)}%, var(--line))`;
}

function draw() {
  const begin = performance.now();
  const links = linksOf(state.leaves, data.edges);
  const wires = arrange(state.root, links);
  const boxes = visibleBoxes(state.root);
  const chosenHadFocus = world.contains(document.activeElement);
  const pieces = document.createDocumentFragment();
  state.elements = new Map();
  for (const box of boxes) {
    const elements = box.open ? openBox(box) : [closedBox(box)];
    const handle = elements[elements.length - 1];
    handle.dataset.box = box.id;
    state.elements.set(box, { handle, all: elements });
    pieces.append(...elements);
  }
  world.replaceChildren(drawing(wires), pieces);
  state.boxes = boxes;
  state.byId = new Map(boxes.map((box) => [String(box.id), box]));
  state.wires = wires;
  if (!state.elements.has(state.chosen)) state.chosen = state.chosen ? shownInstead(state.chosen) : null;
  mark();
  resize();
  keepTitlesInSight();
  if (chosenHadFocus) focusChosen();
  state.drawMs = performance.now() - begin;
}

function drawing(wires) {
  const svg = document.createElementNS(SVG, "svg");
  svg.id = "edges";
  svg.setAttribute("width", state.root.w);
  svg.setAttribute("height", state.root.h);
  svg.setAttribute("aria-hidden", "true");
  const marker = document.createElementNS(SVG, "marker");
  for (const [name, value] of Object.entries({ id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7,
    orient: "auto", markerUnits: "userSpaceOnUse" })) marker.setAttribute(name, value);
  const head = document.createElementNS(SVG, "path");
  head.setAttribute("d", "M0 0L8 4L0 8z");
  marker.append(head);
  const definitions = document.createElementNS(SVG, "defs");
  definitions.append(marker);
  svg.append(definitions);
  for (const wire of wires) {
    wire.element = document.createElementNS(SVG, "path");
    wire.element.setAttribute("d", wire.path);
    if (wire.isEnd) wire.element.setAttribute("marker-end", "url(#arrow)");
    const carried = new Set(wire.links.flatMap((link) => [...link.values]).map((value) => data.values[value].residency));
    const special = ["stateful_kv_cache", "gradient", "optimizer_state"].find((name) => carried.has(name));
    if (special) wire.element.style.setProperty("--tone", tone("residency", special));
    svg.append(wire.element);
  }
  return svg;
}

function put(element, box, width, height) {
  Object.assign(element.style, { left: `${box.x}px`, top: `${box.y}px`, width: `${width}px`, height: `${height}px` });
  return element;
}

function asItem(box) {
  return { role: "treeitem", tabindex: "-1", "aria-level": box.depth, "aria-expanded": box.kind === "group" ? String(box.open) : undefined,
    tone: toneOf(box) };
}

function tagsOf(box) {
  return [...new Set(box.matches.map((match) => plain(match.pattern)))].filter((name) => name !== box.name)
    .map((name) => make("span", { class: "tag" }, name));
}

function openBox(box) {
  const shell = put(make("div", { class: `box shell${box.depth % 2 ? "" : " even"}`, tone: toneOf(box), "aria-hidden": "true" }), box, box.w, box.h);
  shell.dataset.box = box.id;
  const title = make("div", { class: `box title${box.depth % 2 ? "" : " even"}`, ...asItem(box), "aria-label": spoken(box) },
    make("span", { class: "fold" }), make("span", { class: "name" }, titleOf(box)), ...tagsOf(box),
    make("span", { class: "more" }, summaryOf(box)));
  Object.assign(title.style, { left: `${box.x + 4}px`, top: `${box.y + 2}px`, maxWidth: `${box.w - 8}px` });
  return [shell, title];
}

function closedBox(box) {
  return put(box.kind === "group" ? groupCard(box) : nodeCard(box), box, box.w, box.h);
}

function groupCard(box) {
  const kind = state.colour === "residency" ? "residency" : "phase";
  const mix = make("span", { class: "mix" }, ...(box.tally[kind].size > 1 ? [...box.tally[kind]] : []).map(([name, count]) => {
    const piece = make("i", { tone: tone(kind, name) });
    piece.style.flexGrow = count;
    return piece;
  }));
  const inside = [...box.tally.pattern].filter(([name]) => !box.matches.some((match) => match.pattern === name))
    .map(([name, count]) => (count > 1 ? `${count} ${plain(name)}` : plain(name))).join(", ");
  return make("div", { class: "box card shut", ...asItem(box), "aria-label": spoken(box) },
    make("div", { class: "row" }, make("span", { class: "fold" }), make("span", { class: "name" }, titleOf(box)), ...tagsOf(box),
      make("span", { class: "end" }, counted(box.count, "op"))),
    make("div", { class: "row" }, make("span", { class: "soft" }, inside || summaryOf(box, true)),
      make("span", { class: "end" }, box.flops ? amount(box.flops, "FLOP") : "")), mix);
}

function nodeCard(box) {
  const { node } = box;
  const slim = node.memory === "none", long = !slim && box.name.length > 15;
  const head = make("div", { class: "row" }, make("span", { class: "name code" }, box.name), pipsOf(node),
    make("span", { class: "end" }, long ? "" : shapeOf(node.shape)));
  const soft = [box.label, node.role && node.role.split(".").pop().replaceAll("_", " ")].filter(Boolean).join(" · ");
  const foot = slim ? null : make("div", { class: "row" }, ...tagsOf(box), make("span", { class: "soft" }, soft || node.dtype || ""),
    make("span", { class: "end" }, long ? shapeOf(node.shape) : node.flops >= 1000 ? amount(node.flops, "FLOP") : ""));
  return make("div", { class: `box card${slim ? " slim" : ""}`, ...asItem(box), "aria-label": spoken(box) }, head, foot);
}

const COMMON = new Set(["unknown", "ephemeral_activation"]);

function comesFrom(node) {
  // Residency of what a node reads from outside of its step: weights, caches, inputs.
  const isOutside = (value) => {
    const from = data.producer.get(value);
    return from === undefined || state.leaves[from].step !== state.leaves[node.position].step;
  };
  const outside = node.inputs.filter(isOutside).map((value) => data.values[value].residency);
  return [...new Set(outside)].filter((name) => !COMMON.has(name));
}

function pipsOf(node) {
  const pips = comesFrom(node).map((name) => make("i", { tone: tone("residency", name) }));
  if (!COMMON.has(node.residency)) pips.push(make("i", { class: "own", tone: tone("residency", node.residency) }));
  return pips.length ? make("span", { class: "pips" }, ...pips) : "";
}

function titleOf(box) {
  if (!box.fixed) return box.name;
  const phases = [...box.tally.phase].sort((a, b) => b[1] - a[1]).map(([name]) => name);
  return box.name.startsWith("call") && phases[0] !== "unknown" ? `${box.name} · ${plain(phases[0])}` : box.name;
}

function summaryOf(box, short = false) {
  const parts = [counted(box.count, "op"), box.flops ? amount(box.flops, "FLOP") : "", amount(box.bytes, "B")];
  return (short ? parts.slice(2) : parts).filter(Boolean).join(" · ");
}

function spoken(box) {
  if (box.kind === "group") return `${titleOf(box)}, ${summaryOf(box)}`;
  return [box.name, box.label, shapeOf(box.node.shape), plain(box.node.phase)].filter(Boolean).join(", ");
}

function mark() {
  // Everything that changes without a new layout: the choice, what is found, what the legend holds back.
  const near = new Set(), hot = new Set();
  if (state.chosen && !state.chosen.open) {
    for (const wire of state.wires) {
      const mine = wire.links.filter((link) => link.source === state.chosen || link.target === state.chosen);
      if (!mine.length) continue;
      hot.add(wire);
      for (const link of mine) near.add(link.source).add(link.target);
    }
  }
  for (const wire of state.wires) wire.element.classList.toggle("hot", hot.has(wire));
  const hits = new Set(state.hits.map((leaf) => shownInstead(state.leaves[leaf])));
  for (const [box, { handle, all }] of state.elements) {
    const held = state.filter && !box.tally[state.filter.kind].has(state.filter.name);
    for (const element of all) element.classList.toggle("dim", Boolean(held));
    handle.classList.toggle("chosen", box === state.chosen);
    handle.classList.toggle("near", near.has(box) && box !== state.chosen);
    handle.classList.toggle("hit", hits.has(box));
    handle.tabIndex = box === (state.chosen || state.boxes[0]) ? 0 : -1;
    handle.setAttribute("aria-selected", String(box === state.chosen));
  }
}

function resize() {
  world.style.transform = `scale(${state.zoom})`;
  Object.assign(world.style, { width: `${state.root.w}px`, height: `${state.root.h}px` });
  Object.assign(sizer.style, { width: `${state.root.w * state.zoom}px`, height: `${state.root.h * state.zoom}px` });
}

function zoomTo(zoom) {
  const centre = [(stage.scrollLeft + stage.clientWidth / 2) / state.zoom, (stage.scrollTop + stage.clientHeight / 2) / state.zoom];
  state.zoom = Math.min(2.5, Math.max(0.1, zoom));
  resize();
  stage.scrollTo(centre[0] * state.zoom - stage.clientWidth / 2, centre[1] * state.zoom - stage.clientHeight / 2);
}

function fit() {
  // All of it, unless that is too small to read; then its width.
  const [wide, high] = [stage.clientWidth / state.root.w, stage.clientHeight / state.root.h];
  zoomTo(Math.min(1, wide, high < 0.3 ? wide : high));
  toMiddle();
}

function toMiddle() {
  stage.scrollTo({ left: (sizer.offsetWidth - stage.clientWidth) / 2, top: 0, behavior: "instant" });
}

function keepTitlesInSight() {
  // The title of a box that begins left of what is seen moves along to the right.
  const left = Math.max(0, (stage.scrollLeft - sizer.offsetLeft) / state.zoom);
  for (const box of state.boxes) {
    if (!box.open) continue;
    const title = state.elements.get(box).handle;
    const x = Math.max(box.x + 4, Math.min(left + 4, box.x + box.w - Math.min(box.w, 260)));
    title.style.left = `${x}px`;
    title.style.maxWidth = `${box.x + box.w - x - 4}px`;
  }
}

function bringIntoView(box) {
  const entry = state.elements.get(box);
  if (entry) entry.handle.scrollIntoView({ block: "center", inline: "center", behavior: "instant" });
}

function keepingInPlace(box, change) {
  // The box that was folded or unfolded stays where the eye is.
  const before = state.elements.get(box);
  const at = before && before.handle.getBoundingClientRect();
  change();
  const after = state.elements.get(box);
  if (!at || !after) return;
  const now = after.handle.getBoundingClientRect();
  stage.scrollBy({ left: now.left - at.left, top: now.top - at.top, behavior: "instant" });
}
