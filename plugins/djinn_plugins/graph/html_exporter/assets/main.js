// The page: its summary, its tools, its keys.

const MOST_FOUND = 60, FIRST_ROOM = 34;
const state = { mode: "modules", colour: "phase", zoom: 1, chosen: null, hits: [], filter: null, wires: [], boxes: [],
  elements: new Map(), found: [], at: -1 };
const query = document.getElementById("query"), found = document.getElementById("found");

function start() {
  summarise();
  tools();
  keyHelp();
  regroup();
  showDetails(null);
  const wanted = decodeURIComponent(location.hash.slice(1));
  const leaf = wanted && state.leaves.find((one) => one.node.id === wanted);
  if (leaf) choose(leaf, true);
}

function regroup() {
  const leaf = state.chosen && state.leaves[state.chosen.first];
  Object.assign(state, buildTree(state.mode), { chosen: null });
  unfoldSome(state.root, FIRST_ROOM);
  draw();
  toMiddle();
  legend();
  if (leaf) choose(state.leaves[leaf.first], true);
}

function summarise() {
  const { profile } = data;
  const head = document.getElementById("summary");
  const fact = (value, name) => make("span", {}, make("b", {}, value), ` ${name}`);
  const name = plain(profile.workload);
  const sure = profile.confidence > 0 && profile.confidence < 1 ? make("small", {}, ` ${Math.round(100 * profile.confidence)}% sure`) : "";
  head.replaceChildren(make("div", { class: "head" },
    make("h1", {}, name === "unknown" ? "Graph" : name[0].toUpperCase() + name.slice(1), sure),
    make("p", { class: "facts" }, fact(data.nodes.length.toLocaleString("en"), data.nodes.length === 1 ? "operation" : "operations"),
      fact(amount(profile.flops, "FLOP"), ""), fact(amount(profile.bytes_moved, "B"), "moved"),
      profile.compute_intensity ? fact(profile.compute_intensity.toFixed(1), "FLOP/B") : "",
      fact(data.backend === "fx" ? "torch.fx" : "lazy DAG", "source"))));
  if (data.fallback) head.append(make("p", { id: "note" }, `Not traced: ${data.fallback}`));
  const strips = make("div", { class: "strips" });
  const steps = runsOf(profile.steps);
  if (steps.length) strips.append(make("div", { class: "strip", id: "steps" }, make("span", {}, "Steps"), ...steps.slice(0, 24).map(stepChip),
    steps.length > 24 ? make("span", {}, `and ${steps.length - 24} more`) : ""));
  const patterns = Object.entries(profile.patterns);
  if (patterns.length) strips.append(make("div", { class: "strip", id: "patterns" }, make("span", {}, "Patterns"), ...patterns.map(([pattern, count]) =>
    make("button", { class: "chip", type: "button", title: `Find ${plain(pattern)}`, onclick: () => ask(`pattern:${pattern}`) },
      `${plain(pattern)} `, make("b", {}, String(count))))));
  const kinds = RESIDENCIES.filter((kind) => profile.residency_bytes[kind] > 0);
  if (kinds.length) strips.append(make("div", { class: "strip", id: "residencies" }, make("span", {}, "Values"),
    make("span", { class: "bar", "aria-hidden": "true" }, ...kinds.map((kind) => {
      const piece = make("i", { tone: tone("residency", kind) });
      piece.style.flexGrow = profile.residency_bytes[kind];
      return piece;
    })), make("span", {}, kinds.map((kind) => `${plain(kind)} ${amount(profile.residency_bytes[kind], "B")}`).join(" · "))));
  head.append(strips);
}

function runsOf(steps) {
  const runs = [];
  steps.forEach((phase, index) => {
    const last = runs[runs.length - 1];
    if (last && last.phase === phase) last.count++;
    else runs.push({ phase, count: 1, first: index });
  });
  return runs;
}

function stepChip({ phase, count, first }) {
  const go = () => {
    const leaf = state.leaves.find((one) => one.node.call === first) || state.leaves.find((one) => one.node.phase === phase);
    if (!leaf) return;
    const call = [leaf, ...crumbsOf(leaf)].find((box) => box.fixed);
    choose(call || leaf, true);
  };
  return make("button", { class: "chip", type: "button", tone: tone("phase", phase), title: "Go there", onclick: go }, plain(phase),
    count > 1 ? make("b", {}, ` × ${count}`) : "");
}

function tools() {
  choice("grouping", ["modules", "patterns"], "mode", regroup);
  choice("colouring", ["phase", "residency", "flops", "bytes"], "colour", () => {
    state.filter = null;
    draw();
    legend();
  });
  buttons("folding", [["Unfold all", unfoldAll, "Unfold as much as stays readable"], ["Fold all", foldAll, ""]]);
  buttons("zooming", [["−", () => zoomTo(state.zoom / 1.25), "Zoom out"], ["Fit", fit, "Show all"], ["+", () => zoomTo(state.zoom * 1.25), "Zoom in"]]);
  const theme = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  const wear = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    theme.textContent = { auto: "◐ auto", light: "○ light", dark: "● dark" }[name];
    theme.onclick = () => wear(themes[(themes.indexOf(name) + 1) % 3]);
  };
  theme.title = "Light or dark";
  wear("auto");
}

function choice(id, names, field, then) {
  const group = document.querySelector(`#${id} div`);
  const press = () => [...group.children].forEach((button) => button.setAttribute("aria-pressed", String(button.value === state[field])));
  group.replaceChildren(...names.map((name) => make("button", { type: "button", value: name, onclick: () => {
    state[field] = name;
    press();
    then();
  } }, name === "flops" ? "FLOPs" : name)));
  press();
}

function buttons(id, entries) {
  document.querySelector(`#${id} div`).replaceChildren(...entries.map(([name, action, title]) =>
    make("button", { type: "button", onclick: action, title: title || false }, name)));
}

function keyHelp() {
  const keys = [["↑ ↓", "previous, next"], ["→", "unfold, go in"], ["←", "fold, go out"], ["Enter", "fold or unfold"], ["/", "find"],
    ["+ − 0", "zoom, fit"], ["Esc", "clear"]];
  document.getElementById("keys").replaceChildren(make("h2", {}, "Keys"), pairs(keys.map(([key, what]) => [make("kbd", {}, key), what])));
}

function legend() {
  const holder = document.getElementById("legend");
  const heat = state.colour === "flops" || state.colour === "bytes";
  document.getElementById("legend-title").textContent =
    { phase: "Phase", residency: "Residency of the result", flops: "FLOPs of each operation", bytes: "Bytes of each operation" }[state.colour];
  if (heat) holder.replaceChildren(make("div", {}, make("i", { class: "ramp" }), make("span", {}, " few to many (logarithmic)")));
  else {
    const all = state.colour === "phase" ? PHASES : RESIDENCIES;
    const tally = state.root.tally[state.colour];
    holder.replaceChildren(...all.filter((name) => tally.has(name)).map((name) => {
      const isHeld = state.filter && state.filter.name === name;
      return make("button", { type: "button", "aria-pressed": String(Boolean(isHeld)), tone: tone(state.colour, name), onclick: () => {
        state.filter = isHeld ? null : { kind: state.colour, name };
        mark();
        legend();
      } }, make("i"), plain(name), make("span", {}, tally.get(name).toLocaleString("en")));
    }));
  }
  const pip = (name, label, own) => make("span", {}, make("span", { class: "pips" }, make("i", { tone: tone("residency", name), class: own })), ` ${label} ${plain(name)}`);
  const read = new Set(data.nodes.flatMap(comesFrom)), given = new Set(data.nodes.map((node) => node.residency));
  document.getElementById("key").replaceChildren(...RESIDENCIES.filter((name) => read.has(name)).map((name) => pip(name, "reads", "")),
    ...RESIDENCIES.filter((name) => given.has(name) && !COMMON.has(name)).map((name) => pip(name, "gives", "own")));
}

function choose(box, move = false) {
  if (box && box.parent) unfoldTo(box);
  state.chosen = box;
  if (box && !state.elements.has(box)) draw();
  else mark();
  if (move && box) bringIntoView(box);
  showDetails(box);
}

function focusChosen() {
  const entry = state.elements.get(state.chosen);
  if (entry) entry.handle.focus({ preventScroll: true });
}

function toggle(box) {
  if (box.kind !== "group") return;
  keepingInPlace(box, () => {
    box.open = !box.open;
    state.chosen = box;
    draw();
  });
  showDetails(box);
}

function unfoldAll() {
  keepingInPlace(state.chosen || state.boxes[0], () => {
    unfoldSome(state.root, MOST_VISIBLE);
    draw();
  });
}

function foldAll() {
  const fold = (box) => {
    box.open = false;
    box.children.forEach(fold);
  };
  state.root.children.forEach(fold);
  draw();
  toMiddle();
}

// Finding.

function wordsOf(leaf) {
  const { node } = leaf;
  const values = [...node.inputs, ...node.outputs].map((value) => data.values[value].name || "");
  return [node.id, node.operation, node.module, node.type, node.role, shapeOf(node.shape), node.phase, plain(node.phase),
    ...node.matches.map((match) => `pattern:${match.pattern} ${plain(match.pattern)}`), ...values].filter(Boolean).join("\n").toLowerCase();
}

function search(text) {
  const terms = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!terms.length) return { groups: [], nodes: [] };
  const fits = (words) => terms.every((term) => words.includes(term));
  state.words = state.words || state.leaves.map(wordsOf);
  const nodes = state.leaves.filter((leaf) => fits(state.words[leaf.first]));
  const groups = [];
  const visit = (box) => {
    const last = box.path ? box.path.toLowerCase() : box.name.toLowerCase();
    const own = `${last}\n${box.matches.map((match) => `pattern:${match.pattern}`).join("\n")}`;
    if (box.parent && box.kind === "group" && fits(own)) groups.push(box);
    box.children.forEach(visit);
  };
  visit(state.root);
  groups.sort((a, b) => (a.path || a.name).length - (b.path || b.name).length || a.first - b.first);
  return { groups, nodes };
}

function ask(text) {
  query.value = text;
  query.focus();
  find();
}

function find() {
  const { groups, nodes } = search(query.value);
  state.hits = nodes.map((leaf) => leaf.first);
  const entries = [...groups.slice(0, MOST_FOUND / 3), ...nodes.slice(0, MOST_FOUND)];
  state.found = [...groups, ...nodes];
  state.at = -1;
  found.replaceChildren(...entries.map((box, index) => make("li", { role: "option", id: `found-${index}`, "aria-selected": "false",
    onmousedown: (event) => {
      event.preventDefault();
      goTo(box);
    } }, make("b", {}, box.kind === "group" ? `▸ ${titleOf(box)}` : box.name),
    make("span", {}, box.kind === "group" ? counted(box.count, "op") : [box.step ? box.step.name : "", box.node.module, shapeOf(box.node.shape)].filter(Boolean).join("  ")))));
  state.entries = entries;
  query.setAttribute("aria-expanded", String(entries.length > 0));
  document.getElementById("count").textContent = query.value.trim() ? (nodes.length + groups.length).toLocaleString("en") + " found" : "";
  mark();
}

function goTo(box) {
  choose(box, true);
  closeFound();
}

function closeFound() {
  found.replaceChildren();
  query.setAttribute("aria-expanded", "false");
}

function stepFound(by) {
  if (!state.entries || !state.entries.length) return;
  if (!found.children.length) find();
  state.at = (state.at + by + state.entries.length) % state.entries.length;
  [...found.children].forEach((item, index) => item.setAttribute("aria-selected", String(index === state.at)));
  found.children[state.at].scrollIntoView({ block: "nearest" });
  query.setAttribute("aria-activedescendant", `found-${state.at}`);
  choose(state.entries[state.at], true);
}

query.addEventListener("input", find);
query.addEventListener("blur", closeFound);
query.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") stepFound(1);
  else if (event.key === "ArrowUp") stepFound(-1);
  else if (event.key === "Enter") {
    if (state.at < 0) stepFound(event.shiftKey ? -1 : 1);
    closeFound();
    focusChosen();
  } else if (event.key === "Escape") clear();
  else return;
  event.preventDefault();
});

function clear() {
  query.value = "";
  state.filter = null;
  find();
  legend();
  choose(null);
}

// Pointer and keys on the stage.

function boxAt(target) {
  const element = target.closest && target.closest("[data-box]");
  return element ? state.byId.get(element.dataset.box) : null;
}

world.addEventListener("click", (event) => {
  const box = boxAt(event.target);
  if (!box || event.target.closest(".shell")) {
    choose(null);
    return;
  }
  if (box.kind === "group") toggle(box);
  else choose(box);
  focusChosen();
});
world.addEventListener("mousemove", (event) => {
  const box = event.target.closest && event.target.closest(".card, .title") ? boxAt(event.target) : null;
  showHover(box, event);
});
stage.addEventListener("mouseleave", () => showHover(null));
stage.addEventListener("scroll", () => {
  showHover(null);
  keepTitlesInSight();
});
stage.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoomTo(state.zoom * Math.exp(-event.deltaY / 300));
}, { passive: false });

function step(by) {
  const at = state.boxes.indexOf(state.chosen);
  go(state.boxes[Math.min(state.boxes.length - 1, Math.max(0, at + by))]);
}

function go(box) {
  if (!box) return;
  choose(box);
  focusChosen();
  const { handle } = state.elements.get(box);
  handle.scrollIntoView({ block: "nearest", inline: "nearest" });
}

const KEYS = {
  ArrowDown: () => step(1),
  ArrowUp: () => step(-1),
  ArrowRight: (box) => (box.kind === "group" && box.open ? go(box.children[0]) : toggle(box)),
  ArrowLeft: (box) => (box.kind === "group" && box.open ? toggle(box) : go(box.parent.parent ? box.parent : box)),
  Enter: (box) => toggle(box),
  " ": (box) => toggle(box),
  Home: () => go(state.boxes[0]),
  End: () => go(state.boxes[state.boxes.length - 1]),
};

world.addEventListener("keydown", (event) => {
  const action = KEYS[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action(state.chosen || state.boxes[0]);
});

document.addEventListener("keydown", (event) => {
  if (event.target === query || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") query.focus();
  else if (event.key === "Escape") clear();
  else if (event.key === "+" || event.key === "=") zoomTo(state.zoom * 1.25);
  else if (event.key === "-") zoomTo(state.zoom / 1.25);
  else if (event.key === "0") fit();
  else return;
  event.preventDefault();
});

start();
