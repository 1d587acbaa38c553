// The graph as nested boxes. Every box is a run of program order, so edges between neighbours lead downwards only.

const FEW_CHILDREN = 48;
const PARTS = 24;
const WIDEST_GAP = 12;
const WHOLES = new Set(["llm", "vision_encoder"]);

let boxesMade = 0;

function makeBox(kind, name, first, last) {
  return { id: boxesMade++, kind, name, first, last, parent: null, children: [], matches: [], open: false, fixed: false };
}

function adopt(parent, child) {
  child.parent = parent;
  parent.children.push(child);
}

function buildTree(mode) {
  const root = makeBox("group", "graph", 0, data.nodes.length - 1);
  root.open = true;
  const leaves = data.nodes.map((node, position) =>
    Object.assign(makeBox("node", shortName(node.operation), position, position), { node, label: "" }));
  nest(root, leaves, pathsOf(mode));
  const bySize = data.matches.map((match) => ({ match, span: spanOf(match) }))
    .sort((a, b) => (b.span[1] - b.span[0]) - (a.span[1] - a.span[0]));
  for (const { match, span } of bySize) enclose(leaves, match, span);
  tidy(root);
  if (root.children.some((child) => child.fixed)) gatherLoose(root);
  split(root);
  measure(root, 0);
  return { root, leaves };
}

function pathsOf(mode) {
  // The outermost level tells calls, backward passes and optimizer steps apart, where there are several.
  const tops = data.nodes.map(topOf);
  const several = new Set(tops.map((top) => top.key)).size > 1;
  const known = new Map();
  return (node) => {
    const top = tops[node.position];
    const key = `${top.key}|${node.module || ""}`;
    if (!known.has(key)) {
      const modules = mode === "modules" && node.module ? node.module.split(".") : [];
      const named = modules.map((part, index) =>
        ({ key: part, name: /^\d+$/.test(part) && index ? `${modules[index - 1]}.${part}` : part,
           path: modules.slice(0, index + 1).join(".") }));
      known.set(key, several && top.key ? [{ ...top, fixed: true }, ...named] : named);
    }
    return known.get(key);
  };
}

function topOf(node) {
  if (node.phase === "backward") return { key: "backward", name: "backward" };
  if (node.phase === "optimizer_step") return { key: "optimizer", name: "optimizer step" };
  return node.call >= 0 ? { key: `call ${node.call}`, name: `call ${node.call}` } : { key: "", name: "" };
}

function nest(root, leaves, pathOf) {
  const open = [root];
  for (const leaf of leaves) {
    const path = pathOf(leaf.node);
    let depth = 0;
    while (depth < path.length && depth + 1 < open.length && open[depth + 1].key === path[depth].key) depth++;
    open.length = depth + 1;
    for (; depth < path.length; depth++) {
      const group = Object.assign(makeBox("group", path[depth].name, leaf.first, leaf.first), path[depth]);
      adopt(open[depth], group);
      open.push(group);
    }
    adopt(open[open.length - 1], leaf);
  }
}

function spanOf(match) {
  const at = [...match.nodes].sort((a, b) => a - b);
  if (WHOLES.has(match.pattern)) return [at[0], at[at.length - 1]];
  // A node far from the others (a mask made at the beginning) must not draw the box around half of the graph.
  let best = [0, 0];
  for (let begin = 0, index = 1; index <= at.length; index++) {
    if (index < at.length && at[index] - at[index - 1] <= WIDEST_GAP) continue;
    if (index - begin > best[1] - best[0]) best = [begin, index];
    begin = index;
  }
  return [at[best[0]], at[best[1] - 1]];
}

function enclose(leaves, match, [first, last]) {
  if (first === last) {
    leaves[first].matches.push(match);
    return;
  }
  const above = new Set();
  for (let box = leaves[first].parent; box; box = box.parent) above.add(box);
  let group = leaves[last].parent;
  while (!above.has(group)) group = group.parent;
  const childOver = (leaf) => {
    let box = leaf;
    while (box.parent !== group) box = box.parent;
    return group.children.indexOf(box);
  };
  const from = childOver(leaves[first]), to = childOver(leaves[last]);
  if (group.parent && from === 0 && to === group.children.length - 1) {
    group.matches.push(match);
    return;
  }
  if (from === to || group.children.slice(from, to + 1).some((child) => child.fixed)) return;
  const made = Object.assign(makeBox("group", plain(match.pattern), first, last), { parent: group, matches: [match] });
  for (const child of group.children.splice(from, to - from + 1, made)) adopt(made, child);
}

function tidy(box) {
  box.children.forEach(tidy);
  box.children = box.children.map((child) => {
    if (child.kind !== "group" || child.fixed || child.children.length !== 1) return child;
    const only = child.children[0];
    const matches = [...child.matches, ...only.matches];
    if (only.kind === "node") only.label = only.label || (child.path ? child.name : "");
    else if (child.path && only.path) {
      const tail = only.name.startsWith(`${child.name}.`) ? only.name.slice(child.name.length + 1) : only.name;
      only.name = `${child.name}.${tail}`;
    } else if (child.path) Object.assign(only, { name: child.name, path: child.path });
    return Object.assign(only, { parent: box, matches });
  });
}

function gatherLoose(root) {
  // Single operations between calls, three and more in a row, become one box.
  const children = [];
  for (const child of root.children) {
    const last = children[children.length - 1];
    if (child.kind !== "node") children.push(child);
    else if (last && last.isLoose) adopt(last, child);
    else {
      const group = Object.assign(makeBox("group", "between calls", 0, 0), { isLoose: true });
      adopt(group, child);
      children.push(group);
    }
  }
  root.children = children.flatMap((child) => (child.isLoose && child.children.length < 3 ? child.children : [child]));
}

function split(box) {
  if (box.children.length > FEW_CHILDREN) {
    const size = Math.ceil(box.children.length / PARTS);
    const parts = [];
    for (let begin = 0; begin < box.children.length; begin += size) {
      const members = box.children.slice(begin, begin + size);
      if (members.length === 1) {
        parts.push(members[0]);
        continue;
      }
      const [head, tail] = [members[0], members[members.length - 1]];
      const groups = members.every((member) => member.kind === "group");
      const part = makeBox("group", groups ? `${head.name} – ${tail.name}` : "", 0, 0);
      part.isPart = !groups;
      members.forEach((member) => adopt(part, member));
      part.parent = box;
      parts.push(part);
    }
    box.children = parts;
  }
  box.children.forEach(split);
}

function measure(box, depth) {
  box.depth = depth;
  // The call, backward pass or optimizer step that it belongs to.
  box.step = box.fixed ? box : box.parent && box.parent.step;
  box.tally = { phase: new Map(), residency: new Map(), pattern: new Map() };
  if (box.kind === "node") {
    const { node } = box;
    Object.assign(box, { count: 1, flops: node.flops, bytes: node.read + node.written });
    box.tally.phase.set(node.phase, 1);
    box.tally.residency.set(node.residency, 1);
  } else {
    Object.assign(box, { count: 0, flops: 0, bytes: 0 });
    for (const child of box.children) {
      child.parent = box;
      measure(child, depth + 1);
      for (const sum of ["count", "flops", "bytes"]) box[sum] += child[sum];
      for (const [kind, counts] of Object.entries(child.tally)) {
        for (const [name, count] of counts) box.tally[kind].set(name, (box.tally[kind].get(name) || 0) + count);
      }
    }
    box.first = box.children.length ? box.children[0].first : 0;
    box.last = box.children.length ? box.children[box.children.length - 1].last : -1;
    if (box.isPart) box.name = `operations ${box.first + 1}–${box.last + 1}`;
  }
  for (const match of box.matches) box.tally.pattern.set(match.pattern, (box.tally.pattern.get(match.pattern) || 0) + 1);
}

function visibleBoxes(box, found = []) {
  for (const child of box.children) {
    found.push(child);
    if (child.open) visibleBoxes(child, found);
  }
  return found;
}

function shownInstead(leaf) {
  // The outermost closed box around a leaf, or the leaf itself.
  let shown = leaf;
  for (let box = leaf.parent; box; box = box.parent) if (!box.open) shown = box;
  return shown;
}

function unfoldTo(box) {
  for (let above = box.parent; above; above = above.parent) above.open = true;
}

function unfoldSome(root, room) {
  // Level by level, as long as all of a level fits; of the first level, at least one box.
  let level = root.children, shown = level.length, isFirst = true;
  while (level.length) {
    const groups = level.filter((box) => box.kind === "group");
    const more = groups.reduce((sum, box) => sum + box.children.length, 0);
    if (!groups.length) return;
    if (shown + more > room) {
      const fits = (box) => shown + box.children.length <= room;
      const fitting = groups.find((box) => box.fixed && fits(box)) || groups.find(fits);
      if (!isFirst || !fitting) return;
      fitting.open = true;
      shown += fitting.children.length;
      level = fitting.children;
    } else {
      for (const box of groups) box.open = true;
      shown += more;
      level = groups.flatMap((box) => box.children);
    }
    isFirst = false;
  }
}
