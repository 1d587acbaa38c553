// Layers from top to bottom. Each open box is laid out by itself; edges that cross its border pass through ports on it.

const ROW_GAP = 26, PORT_GAP = 16, ITEM_GAP = 22, WIRE_GAP = 9, PADDING = 14, TITLE = 28, WIDEST_ROW = 1150, SWEEPS = 8;
const SIZES = { node: [212, 44], slim: [196, 26], group: [248, 58] };

function sizeOf(box) {
  return SIZES[box.kind === "group" ? "group" : box.node.memory === "none" ? "slim" : "node"];
}

function arrange(root, links) {
  const plans = new Map();
  for (const link of links) route(plans, link);
  const wires = [];
  place(root, plans);
  locate(root, 0, 0, plans, wires);
  return wires;
}

function route(plans, link) {
  // Cut an edge between visible boxes at every border that it crosses.
  const above = new Set();
  for (let box = link.source.parent; box; box = box.parent) above.add(box);
  let common = link.target.parent;
  while (!above.has(common)) common = common.parent;
  let from = link.source;
  for (; from.parent !== common; from = from.parent) lay(plans, from.parent, from, null, link);
  let to = link.target;
  for (; to.parent !== common; to = to.parent) lay(plans, to.parent, null, to, link);
  lay(plans, common, from, to, link);
}

function lay(plans, container, from, to, link) {
  if (!plans.has(container)) plans.set(container, new Map());
  const plan = plans.get(container);
  const key = `${link.source.id}|${from ? from.id : "top"}|${to ? to.id : "bottom"}`;
  if (!plan.has(key)) plan.set(key, { source: link.source, from, to, links: [] });
  plan.get(key).links.push(link);
}

function place(box, plans) {
  for (const child of box.children) {
    if (child.open) place(child, plans);
    else [child.w, child.h] = sizeOf(child);
  }
  const pieces = [...(plans.get(box) || new Map()).values()];
  const vertices = new Map();
  const layers = layersOf(box, pieces, vertices);
  thread(pieces, layers, vertices);
  order(layers);
  align(layers);
  settleRows(box, layers);
}

function layersOf(box, pieces, vertices) {
  const before = new Map(box.children.map((child) => [child, []])), after = new Map(box.children.map((child) => [child, []]));
  const entered = new Set();
  for (const { from, to } of pieces) {
    if (from && to) {
      before.get(to).push(from);
      after.get(from).push(to);
    } else if (to) entered.add(to);
  }
  const used = [], layer = new Map();
  const sit = (child, wanted) => {
    let at = wanted;
    while ((used[at] || 0) + child.w > WIDEST_ROW && used[at]) at++;
    used[at] = (used[at] || 0) + child.w + ITEM_GAP;
    layer.set(child, at);
  };
  let fixed = 0, previous = 1;
  for (const child of box.children) {
    const alone = !before.get(child).length && !after.get(child).length && !entered.has(child);
    // Calls stand below each other, whether or not they are connected; what is connected with nothing, where it ran.
    sit(child, Math.max(child.fixed ? fixed : 0, alone ? previous - 1 : 0, ...before.get(child).map((other) => layer.get(other))) + 1);
    previous = layer.get(child);
    if (child.fixed) fixed = previous;
  }
  // What waits for nothing sits just above who first needs it.
  for (const child of [...box.children].reverse()) {
    if (child.fixed || before.get(child).length || entered.has(child) || !after.get(child).length) continue;
    const latest = Math.min(...after.get(child).map((other) => layer.get(other))) - 1;
    if (latest > layer.get(child) && (used[latest] || 0) + child.w <= WIDEST_ROW) {
      used[layer.get(child)] -= child.w + ITEM_GAP;
      used[latest] = (used[latest] || 0) + child.w + ITEM_GAP;
      layer.set(child, latest);
    }
  }
  const numbers = [...new Set(layer.values())].sort((a, b) => a - b);
  const dense = new Map(numbers.map((number, index) => [number, index + 1]));
  const layers = Array.from({ length: numbers.length + 2 }, () => []);
  for (const child of box.children) {
    const at = dense.get(layer.get(child));
    const vertex = { box: child, w: child.w, h: child.h, at, x: 0, up: [], down: [] };
    vertices.set(child, vertex);
    layers[at].push(vertex);
  }
  return layers;
}

function thread(pieces, layers, vertices) {
  // Edges over several layers get a place in each layer between; edges of one source share it.
  const bottom = layers.length - 1;
  const trunks = new Map();
  const wire = (at, key) => {
    if (!trunks.has(key)) trunks.set(key, []);
    const trunk = trunks.get(key);
    if (!trunk[at]) {
      trunk[at] = { box: null, w: 0, h: 0, at, x: 0, up: [], down: [] };
      layers[at].push(trunk[at]);
    }
    return trunk[at];
  };
  const ready = (piece) => (piece.to ? vertices.get(piece.to).at : bottom);
  pieces.sort((a, b) => ready(a) - ready(b));
  for (const piece of pieces) {
    const key = `${piece.source.id}|${piece.from ? piece.from.id : "top"}`;
    const begin = piece.from ? vertices.get(piece.from) : wire(0, key);
    const end = piece.to ? vertices.get(piece.to) : wire(bottom, `${piece.source.id}|bottom`);
    piece.stops = [begin];
    for (let at = begin.at + 1; at < end.at; at++) piece.stops.push(wire(at, key));
    piece.stops.push(end);
    piece.leave = piece.from && piece.from.open ? piece.from.portsOut.get(piece.source.id) || 0 : 0;
    piece.enter = piece.to && piece.to.open ? piece.to.portsIn.get(piece.source.id) || 0 : 0;
    for (let index = 0; index + 1 < piece.stops.length; index++) {
      const [upper, lower] = [piece.stops[index], piece.stops[index + 1]];
      const hop = { upper, lower, leave: index ? 0 : piece.leave, enter: lower === end ? piece.enter : 0 };
      hop.weight = upper.at === 0 || lower.at === bottom ? 0.02 : upper.box || lower.box ? 1 : 4;
      if (!upper.down.some((known) => known.lower === lower && known.leave === hop.leave)) {
        upper.down.push(hop);
        lower.up.push(hop);
      }
    }
  }
  for (const piece of pieces) {
    if (!piece.from) piece.stops[0].enters = piece.source.id;
    if (!piece.to) piece.stops[piece.stops.length - 1].leaves = piece.source.id;
  }
}

function order(layers) {
  const number = (layer) => layer.forEach((vertex, index) => { vertex.index = index; });
  layers.forEach(number);
  const mean = (hops, side) => hops.reduce((sum, hop) => sum + hop[side].index, 0) / hops.length;
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : [...layers].reverse()) {
      for (const vertex of layer) {
        const hops = down ? vertex.up : vertex.down;
        vertex.wish = hops.length ? mean(hops, down ? "upper" : "lower") : vertex.index;
      }
      layer.sort((a, b) => a.wish - b.wish || a.index - b.index);
      number(layer);
    }
  }
}

function apart(left, right) {
  const gap = left.box && right.box ? ITEM_GAP : left.box || right.box ? (ITEM_GAP + WIRE_GAP) / 2 : WIRE_GAP;
  return (left.w + right.w) / 2 + gap;
}

function align(layers) {
  for (const layer of layers) {
    let x = 0;
    layer.forEach((vertex, index) => {
      if (index) x += apart(layer[index - 1], vertex);
      vertex.x = x;
    });
    for (const vertex of layer) vertex.x -= x / 2;
  }
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : [...layers].reverse()) settle(layer, down, sweep === SWEEPS - 1);
  }
  // Ports sit around the middle of the border, so that boxes below each other are joined by straight lines.
  const [left, right] = extentOf(layers.slice(1, -1));
  for (const layer of [layers[0], layers[layers.length - 1]]) {
    layer.forEach((port, index) => { port.x = (left + right) / 2 + (index - (layer.length - 1) / 2) * WIRE_GAP; });
  }
}

function extentOf(layers) {
  let left = Infinity, right = -Infinity;
  for (const layer of layers) {
    for (const vertex of layer) {
      left = Math.min(left, vertex.x - vertex.w / 2);
      right = Math.max(right, vertex.x + vertex.w / 2);
    }
  }
  return left < right ? [left, right] : [0, 0];
}

function settle(layer, down, both) {
  // Everyone as near as possible to where its edges want it, in the given order (least squares, pooling neighbours).
  let offset = 0;
  const pools = [];
  layer.forEach((vertex, index) => {
    if (index) offset += apart(layer[index - 1], vertex);
    vertex.offset = offset;
    let weight = 0, sum = 0;
    const ask = (hops, up) => hops.forEach((hop) => {
      weight += hop.weight;
      sum += hop.weight * (up ? hop.upper.x + hop.leave - hop.enter : hop.lower.x + hop.enter - hop.leave);
    });
    if (down || both) ask(vertex.up, true);
    if (!down || both) ask(vertex.down, false);
    if (!weight) [weight, sum] = [0.05, 0.05 * vertex.x];
    let pool = { weight, sum: sum - weight * offset, members: [vertex] };
    while (pools.length && pools[pools.length - 1].sum / pools[pools.length - 1].weight > pool.sum / pool.weight) {
      const last = pools.pop();
      pool = { weight: last.weight + pool.weight, sum: last.sum + pool.sum, members: [...last.members, ...pool.members] };
    }
    pools.push(pool);
  });
  for (const pool of pools) for (const vertex of pool.members) vertex.x = pool.sum / pool.weight + vertex.offset;
}

function settleRows(box, layers) {
  const [left, right] = extentOf(layers);
  const inner = right - left;
  const least = box.parent ? 215 + 7 * box.name.length + 60 * Math.min(2, box.matches.length) : 0;
  box.w = Math.max(inner + 2 * PADDING, least);
  const shift = (box.w - inner) / 2 - left;
  let y = box.parent ? TITLE : PADDING;
  box.rows = [];
  layers.forEach((layer, at) => {
    const height = Math.max(0, ...layer.map((vertex) => vertex.h));
    const isPort = at === 0 || at === layers.length - 1;
    if (at && layer.length) y += isPort || (at === 1 && layers[0].length) ? PORT_GAP : at === 1 ? 6 : ROW_GAP;
    if (at === layers.length - 1 && !layer.length) y += PADDING;
    box.rows.push({ top: y, bottom: y + height });
    y += height;
    for (const vertex of layer) vertex.x += shift;
  });
  box.h = y;
  // Wires run straight down behind the title, and bend below it.
  box.rows[0] = { top: 0, bottom: box.parent ? TITLE - 2 : 0 };
  const ports = (layer, name) => new Map(layer.filter((v) => !v.box).map((v) => [v[name], v.x - box.w / 2]));
  box.portsIn = ports(layers[0], "enters");
  box.portsOut = ports(layers[layers.length - 1], "leaves");
  box.layers = layers;
}

function locate(box, x, y, plans, wires) {
  box.x = x;
  box.y = y;
  for (const layer of box.layers) {
    for (const vertex of layer) {
      if (!vertex.box) continue;
      const row = box.rows[vertex.at];
      const left = x + vertex.x - vertex.w / 2, top = y + (row.top + row.bottom - vertex.h) / 2;
      if (vertex.box.open) locate(vertex.box, left, top, plans, wires);
      else Object.assign(vertex.box, { x: left, y: top });
    }
  }
  for (const piece of (plans.get(box) || new Map()).values()) wires.push(wireOf(box, piece));
  box.layers = null;
}

function wireOf(box, piece) {
  const last = piece.stops.length - 1;
  let path = "";
  piece.stops.forEach((stop, index) => {
    const row = box.rows[stop.at];
    let px = box.x + stop.x, top = box.y + row.top, bottom = box.y + row.bottom;
    if (index === 0) {
      px += piece.leave;
      const begin = stop.box ? stop.box.y + stop.box.h : top;
      path = `M${round(px)} ${round(begin)}V${round(bottom)}`;
    } else {
      if (index === last) px += piece.enter;
      const end = index === last && stop.box ? stop.box.y : index === last ? box.y + box.h : bottom;
      const bend = Math.max(8, (top - piece.y) / 2);
      path += `C${round(piece.x)} ${round(piece.y + bend)} ${round(px)} ${round(top - bend)} ${round(px)} ${round(top)}`;
      // A line of no length would leave the arrowhead without a direction.
      if (round(end) !== round(top)) path += `V${round(end)}`;
    }
    piece.x = px;
    piece.y = bottom;
  });
  const isEnd = piece.to && piece.links.some((link) => link.target === piece.to);
  return { path, links: piece.links, isEnd };
}

function round(number) {
  return Math.round(number * 10) / 10;
}
