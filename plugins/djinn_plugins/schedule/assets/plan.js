const plan = JSON.parse(document.getElementById('plan').textContent);
const stage = document.getElementById('stage');
const hover = document.getElementById('hover');
const NAMESPACE = 'http://www.w3.org/2000/svg';
const ROW = { planned: 26, measured: 20, link: 18 }, AXIS = 26, GAP = 7, SLIM = 1.2, ROUND = 2;
const WORDS = { planned: 'planned', measured: 'measured', link: 'transfers' };
const end = Math.max(plan.end, 1);
let from = 0, to = end;

const text = (number) => plan.texts[number];
const phaseWord = (phase) => phase.replace(/_/g, ' ');
const tone = (phase) => `var(--${/^[a-z_]+$/.test(phase) ? phase : 'unknown'}, var(--unknown))`;

function time(ns) {
  for (const [unit, size] of [['s', 1e9], ['ms', 1e6], ['µs', 1e3]]) {
    if (ns >= size) return `${Number((ns / size).toPrecision(4))} ${unit}`;
  }
  return `${Number(ns.toPrecision(4))} ns`;
}

function make(name, attributes, parent, content) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (content !== undefined) made.textContent = content;
  parent.append(made);
  return made;
}

/* Bars that are too slim to be seen are drawn together with their neighbours, as one bar of many. */
function gathered(bars, scale) {
  const shown = [];
  let many = null;
  for (const bar of bars) {
    if (bar[1] < from || bar[0] > to) continue;
    const x = (Math.max(bar[0], from) - from) * scale, right = (Math.min(bar[1], to) - from) * scale;
    if (right - x >= SLIM) {
      shown.push({ x, right, bars: [bar] });
      many = null;
    } else if (many && x - many.right < SLIM) {
      many.right = Math.max(many.right, right);
      many.bars.push(bar);
    } else {
      many = { x, right, bars: [bar] };
      shown.push(many);
    }
  }
  return shown;
}

function ticks(width) {
  const wanted = (to - from) / Math.max(2, width / 110);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= wanted);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

/* Room for the names of lanes, and for the lanes. */
function columns() {
  const whole = stage.clientWidth - 40;
  const longest = Math.max(...plan.lanes.map((lane) => lane.name.length));
  const left = Math.min(Math.max(150, longest * 7.2 + 84), Math.max(90, whole * 0.34));
  return { whole, left, width: Math.max(40, whole - left) };
}

function draw() {
  const { whole, left, width } = columns();
  const scale = width / (to - from);
  const height = AXIS + plan.lanes.reduce((sum, lane) => sum + ROW[lane.kind] + GAP, 0);
  const svg = document.createElementNS(NAMESPACE, 'svg');
  svg.setAttribute('viewBox', `0 0 ${whole} ${height}`);
  svg.setAttribute('height', height);
  svg.setAttribute('role', 'img');
  svg.setAttribute('aria-label', `${plan.lanes.length} lanes, ${time(end)} in all`);
  const clip = make('clipPath', { id: 'clip' }, make('defs', {}, svg));
  make('rect', { x: left, y: 0, width, height }, clip);
  const lanes = make('g', {}, svg), axis = make('g', {}, svg), bars = make('g', { 'clip-path': 'url(#clip)' }, svg);
  for (const at of ticks(width)) {
    const x = left + (at - from) * scale;
    const tick = make('g', { class: 'tick' }, axis);
    make('line', { x1: x, x2: x, y1: AXIS - 6, y2: height }, tick);
    const anchor = x - left < 20 ? 'start' : whole - x < 30 ? 'end' : 'middle';
    make('text', { x, y: AXIS - 11, 'text-anchor': anchor }, tick, at ? time(at) : '0');
  }
  let y = AXIS, named = '';
  for (const lane of plan.lanes) {
    const tall = ROW[lane.kind];
    make('rect', { class: 'lane', x: left, y, width, height: tall, rx: 4 }, lanes);
    const label = make('g', {}, lanes);
    const repeated = lane.name === named;
    if (!repeated) fitted(make('text', { class: 'name', x: 0, y: y + tall / 2 + 4 }, label, lane.name), left - 76);
    make('text', { class: 'kind', x: left - 10, y: y + tall / 2 + 4, 'text-anchor': 'end' }, label, WORDS[lane.kind]);
    named = lane.name;
    for (const shape of gathered(lane.bars, scale)) drawBar(shape, lane, left, y, tall, bars);
    y += tall + GAP;
  }
  stage.replaceChildren(svg);
  svg.querySelectorAll('.name').forEach((label) => fit(label));
  document.getElementById('window').textContent =
    from === 0 && to === end ? time(end) : `${from ? time(from) : 0} to ${time(to)}`;
}

const room = new WeakMap();
function fitted(label, width) { room.set(label, width); }
function fit(label) {
  const full = label.textContent;
  let kept = full.length;
  while (kept > 3 && label.getComputedTextLength() > room.get(label)) {
    kept -= 1;
    label.textContent = `${full.slice(0, kept)}…`;
  }
  if (kept < full.length) make('title', {}, label, full);
}

function drawBar(shape, lane, left, y, tall, parent) {
  const [bar] = shape.bars;
  const isMany = shape.bars.length > 1;
  const wide = Math.max(shape.right - shape.x, 1);
  const drawn = make('rect', {
    class: `bar ${lane.kind}${isMany ? ' many' : ''}`, x: left + shape.x, y: y + 2, width: Math.max(wide - 0.4, 0.8),
    height: tall - 4, rx: Math.min(ROUND, wide / 2),
  }, parent);
  drawn.style.setProperty('--tone', tone(text(bar[4])));
  drawn.told = [shape, lane];
  const name = text(bar[2]);
  if (!isMany && wide > name.length * 6.4 + 10) {
    make('text', { class: `inside ${lane.kind}`, x: left + shape.x + 5, y: y + tall / 2 + 4 }, parent, name);
  }
}

function tell(event) {
  const told = event.target.told;
  hover.hidden = !told;
  if (!told) return;
  const [shape, lane] = told;
  const first = shape.bars[0], last = shape.bars.reduce((a, b) => (b[1] > a[1] ? b : a));
  const lines = [];
  const title = document.createElement('b');
  if (shape.bars.length > 1) {
    title.textContent = `${shape.bars.length} bars close together`;
    const busy = shape.bars.reduce((sum, bar) => sum + bar[1] - bar[0], 0);
    lines.push(`${text(first[2])} to ${text(last[2])}`, `${time(busy)} in all`);
  } else {
    title.textContent = text(first[2]);
    lines.push([text(first[5]), text(first[3])].filter(Boolean).join(' · '));
    if (!['unknown', 'transfer'].includes(text(first[4]))) lines.push(phaseWord(text(first[4])));
    lines.push(time(first[1] - first[0]));
  }
  lines.push(`${WORDS[lane.kind]}, ${first[0] ? time(first[0]) : 0} to ${time(last[1])}`);
  hover.replaceChildren(title, ...lines.filter(Boolean).map((line) => {
    const made = document.createElement('small');
    made.textContent = line;
    return made;
  }));
  const x = Math.min(event.clientX + 14, innerWidth - hover.offsetWidth - 8);
  const below = event.clientY + 16;
  const y = below + hover.offsetHeight > innerHeight ? event.clientY - hover.offsetHeight - 10 : below;
  hover.style.setProperty('left', `${Math.max(4, x)}px`);
  hover.style.setProperty('top', `${Math.max(4, y)}px`);
}

function look(begin, finish) {
  const length = Math.min(end, Math.max(finish - begin, Math.min(20, end)));
  from = Math.min(Math.max(0, begin), end - length);
  to = from + length;
  hover.hidden = true;
  draw();
}

function zoom(factor, at = 0.5) {
  const middle = from + (to - from) * at;
  look(middle - (middle - from) * factor, middle + (to - middle) * factor);
}

function place(event) {
  const { left, width } = columns();
  const x = event.clientX - stage.getBoundingClientRect().left - 20 - left;
  return Math.min(1, Math.max(0, x / width));
}

stage.addEventListener('pointermove', (event) => {
  if (!dragged) return tell(event);
  const moved = place(event) - dragged.place;
  look(dragged.from - moved * (dragged.to - dragged.from), dragged.to - moved * (dragged.to - dragged.from));
});
stage.addEventListener('pointerleave', () => { hover.hidden = true; });
let dragged = null;
stage.addEventListener('pointerdown', (event) => { dragged = { place: place(event), from, to }; });
addEventListener('pointerup', () => { dragged = null; });
stage.addEventListener('wheel', (event) => {
  if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
  event.preventDefault();
  if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event));
  else look(from + event.deltaX * (to - from) / 800, to + event.deltaX * (to - from) / 800);
}, { passive: false });
stage.addEventListener('keydown', (event) => {
  const step = (to - from) / 8;
  const act = {
    '+': () => zoom(0.5), '=': () => zoom(0.5), '-': () => zoom(2), '0': () => look(0, end),
    ArrowLeft: () => look(from - step, to - step), ArrowRight: () => look(from + step, to + step),
  }[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
});
document.getElementById('in').addEventListener('click', () => zoom(0.5));
document.getElementById('out').addEventListener('click', () => zoom(2));
document.getElementById('fit').addEventListener('click', () => look(0, end));

const legend = document.getElementById('legend');
for (const phase of new Set(plan.lanes.flatMap((lane) => lane.bars.map((bar) => text(bar[4]))))) {
  const entry = document.createElement('span');
  entry.style.setProperty('--tone', tone(phase));
  entry.textContent = phaseWord(phase);
  legend.append(entry);
}

const theme = document.getElementById('theme');
const dark = matchMedia('(prefers-color-scheme: dark)');
function isDark() { return document.documentElement.dataset.theme ? document.documentElement.dataset.theme === 'dark' : dark.matches; }
function nameTheme() { theme.textContent = isDark() ? 'Light' : 'Dark'; }
theme.addEventListener('click', () => { document.documentElement.dataset.theme = isDark() ? 'light' : 'dark'; nameTheme(); });
dark.addEventListener('change', nameTheme);
nameTheme();
if (!plan.lanes.length) stage.textContent = 'The scheduler says nothing of when.';
else { addEventListener('resize', draw); draw(); }
