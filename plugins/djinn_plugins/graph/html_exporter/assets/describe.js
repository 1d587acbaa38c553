// What is said of a box: in the panel, and beside the pointer.

function crumbsOf(box) {
  const above = [];
  for (let group = box.parent; group && group.parent; group = group.parent) above.unshift(group);
  return above;
}

function pairs(rows) {
  const list = make("dl");
  for (const [name, value] of rows) {
    if (value === "" || value === null || value === undefined) continue;
    list.append(make("dt", {}, name), make("dd", {}, ...[value].flat()));
  }
  return list;
}

function dotted(kind, name) {
  return [make("i", { class: "dot", tone: tone(kind, name) }), plain(name)];
}

function describe(box) {
  return box.kind === "group" ? describeGroup(box) : describeNode(box);
}

function describeGroup(box) {
  const tallies = (kind) => [...box.tally[kind]].sort((a, b) => b[1] - a[1]);
  const type = box.path ? state.leaves.slice(box.first, box.last + 1).find((leaf) => leaf.node.module === box.path && leaf.node.type) : null;
  return [make("h2", {}, titleOf(box)), pairs([
    ["module", box.path || ""],
    ["class", type ? type.node.type : ""],
    ["operations", box.count.toLocaleString("en")],
    ["FLOPs", box.flops ? amount(box.flops, "FLOP") : ""],
    ["bytes", amount(box.bytes, "B")],
    ["intensity", box.bytes ? `${(box.flops / box.bytes).toFixed(2)} FLOP/B` : ""],
    ["phases", tallies("phase").map(([name, count]) => make("div", {}, ...dotted("phase", name), ` ${count}`))],
    ["patterns", tallies("pattern").map(([name, count]) => make("div", {}, `${plain(name)} ${count > 1 ? count : ""}`))],
    ...box.matches.flatMap(matchRows),
  ].filter(([, value]) => !Array.isArray(value) || value.length))];
}

function matchRows(match) {
  const facts = Object.entries(match.metadata || {}).map(([name, value]) => make("div", {}, `${plain(name)}: ${worded(value)}`));
  const hints = Object.entries(match.hints || {}).map(([name, value]) => make("div", {}, `${plain(name)}: ${worded(value)}`));
  const sure = match.confidence < 1 ? ` (${Math.round(100 * match.confidence)}%)` : "";
  return [[`${plain(match.pattern)}${sure}`, facts], ["hints", hints]];
}

function worded(value) {
  if (value === true) return "yes";
  if (value === false) return "no";
  return typeof value === "object" && value !== null ? JSON.stringify(value) : String(value);
}

function describeNode(box) {
  const { node } = box;
  const rows = [
    ["module", node.module ? `${node.module}${node.type ? ` (${node.type})` : ""}` : ""],
    ["role", node.role ? node.role.replaceAll("_", " ") : ""],
    ["result", [shapeOf(node.shape), node.dtype].filter(Boolean).join("  ")],
    ["phase", dotted("phase", node.phase)],
    ["residency", dotted("residency", node.residency)],
    ["modality", node.modality || ""],
    ["FLOPs", node.flops ? amount(node.flops, "FLOP") : "none"],
    ["bytes", node.read + node.written ? `${amount(node.read, "B")} read, ${amount(node.written, "B")} written` : "none"],
    ["intensity", node.flops && node.read + node.written ? `${(node.flops / (node.read + node.written)).toFixed(2)} FLOP/B` : ""],
    ["memory", plain(node.memory)],
    ["pattern", node.matches.map((match) => plain(match.pattern)).join(", ")],
    ["call", node.call >= 0 ? String(node.call) : ""],
    ["node", node.id],
    ["line", node.line || ""],
  ];
  return [make("h2", {}, node.operation), pairs(rows)];
}

function valueRow(value, isIn) {
  const known = data.values[value];
  const other = isIn ? data.producer.get(value) : undefined;
  const name = other === undefined ? make("b", {}, known.name || (known.kind ? known.kind.replaceAll("_", " ") : known.id))
    : make("button", { type: "button", onclick: () => choose(state.leaves[other], true) }, placeOf(other));
  return make("li", {}, make("i", { tone: tone("residency", known.residency), title: plain(known.residency) }), name,
    make("span", {}, [shapeOf(known.shape), known.dtype].filter(Boolean).join(" ")));
}

function placeOf(position) {
  const node = data.nodes[position];
  return `${shortName(node.operation)}${node.module ? `  ${node.module.split(".").slice(-2).join(".")}` : ""}`;
}

function showDetails(box) {
  const panel = document.getElementById("details");
  if (!box) {
    panel.replaceChildren(make("p", { class: "empty" }, "Choose an operation or a box to see what is known of it."));
    return;
  }
  const path = crumbsOf(box).flatMap((group) =>
    [make("button", { type: "button", onclick: () => choose(group, true) }, titleOf(group)), " / "]);
  const parts = [...(path.length ? [make("p", { class: "crumbs" }, ...path)] : []), ...describe(box)];
  if (box.kind === "node") {
    const next = (data.consumers.get(box.node.position) || []).slice(0, 30);
    parts.push(...listed("Reads", box.node.inputs.map((value) => valueRow(value, true))),
      ...listed("Gives", box.node.outputs.map((value) => valueRow(value, false))),
      ...listed("Goes to", [...new Set(next.map(([target]) => target))].map((target) => make("li", {},
        make("button", { type: "button", onclick: () => choose(state.leaves[target], true) }, placeOf(target))))));
    const told = Object.entries(box.node.evidence || {}).map(([field, [tier, confidence]]) =>
      make("li", {}, make("b", {}, plain(field)), make("span", {}, `${tier} ${Math.round(100 * confidence)}%`)));
    parts.push(...listed("Who decided", told));
    const hints = Object.entries(box.node.hints || {}).map(([name, value]) =>
      make("li", {}, make("b", {}, plain(name)), make("span", {}, worded(value))));
    parts.push(...listed("Hints", hints));
  } else {
    parts.push(make("p", {}, make("button", { class: "plain", type: "button", onclick: () => toggle(box) }, box.open ? "Fold" : "Unfold")));
  }
  panel.replaceChildren(...parts);
}

function listed(name, items) {
  return items.length ? [make("p", { class: "sub" }, name), make("ul", { class: "list" }, ...items)] : [];
}

function showHover(box, event) {
  const card = document.getElementById("hover");
  card.hidden = !box;
  if (!box) return;
  card.replaceChildren(...describe(box));
  const { width, height } = card.getBoundingClientRect();
  const left = event.clientX + 18 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 18;
  Object.assign(card.style, { left: `${Math.max(4, left)}px`, top: `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 6))}px` });
}
