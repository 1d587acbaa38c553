"use strict";
// The page asks for its data every second. It writes text only, never markup, and keeps the secret of this tab alone.

const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const SAID_MS = 20000;
const KEY = "djinn-secret";
const find = (id) => document.getElementById(id);
let secret = sessionStorage.getItem(KEY) || "";
let timer = 0;
let saidTimer = 0;
let answered = 0;
let turn = 0;
const sorted = {};

function make(tag, text, ...classes) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  element.classList.add(...classes);
  return element;
}

function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return `${unit === "B" ? Math.round(bytes) : bytes.toFixed(1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} TiB`;
}

function duration(seconds) {
  if (seconds > 0 && seconds < 0.1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds % 86400 / 3600)} h`;
}

const FORMATS = {
  bytes: size, seconds: duration, count: (value) => value.toLocaleString("en"), text: (value) => value,
  rate: (value) => `${value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 })}/s`, byte_rate: (value) => `${size(value)}/s`,
  part: (value) => `${(100 * value).toFixed(0)} %`,
};
const shown = (column, value) => value === null ? (column.format === "text" ? "" : "–") : FORMATS[column.format](value);

async function ask(path, body) {
  const options = { headers: secret ? { Authorization: `Bearer ${secret}` } : {}, cache: "no-store",
    signal: AbortSignal.timeout(PATIENCE_MS) };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const response = await fetch(path, options);
  const content = await response.json();
  if (!response.ok) {
    throw Object.assign(new Error([content.problem, content.hint].join(" ").trim()), { status: response.status });
  }
  return content;
}

function graphic(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function chart(series) {
  const figure = make("figure");
  const caption = make("figcaption");
  const last = series.values.length ? series.values[series.values.length - 1] : 0;
  caption.append(make("span", series.title), make("b", shown(series, last)));
  const top = Math.max(...series.values, 0);
  const step = 100 / Math.max(series.values.length - 1, 1);
  const points = series.values.map((value, index) =>
    `${(index * step).toFixed(2)},${(39 - 38 * value / Math.max(top, 1e-9)).toFixed(2)}`).join(" ");
  const drawing = graphic("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img",
    "aria-label": `${series.title}, the last ${duration(series.seconds)}` });
  if (points) drawing.append(graphic("polygon", { points: `0,40 ${points} 100,40` }), graphic("polyline", { points }));
  const scale = make("p");
  scale.append(make("span", `peak ${shown(series, top)}`), make("span", duration(series.seconds)));
  figure.append(caption, drawing, scale);
  return figure;
}

// Tables are changed in place: what has the focus, is selected or is scrolled to stays so.
function table(found, isOperator) {
  let section = find(`table-${found.id}`);
  if (!section) {
    section = make("section");
    section.id = `table-${found.id}`;
    const element = make("table");
    element.id = found.id;
    element.createTHead().insertRow();
    element.createTBody();
    section.append(make("h2"), element);
    find("tables").append(section);
  }
  const [title, element] = section.children;
  write(title, `${found.title} (${found.rows.length})`);
  element.hidden = !found.rows.length;
  heads(found, element.tHead.rows[0], isOperator && found.rows.some((row) => row.action));
  rows(found, element.tBodies[0], isOperator);
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function heads(found, line, hasButtons) {
  const titles = found.columns.map((column) => column.title);
  if (line.dataset.titles !== titles.join()) {
    line.dataset.titles = titles.join();
    find(found.id).tBodies[0].replaceChildren();
    line.replaceChildren(...found.columns.map((column, index) => {
      const head = make("th", undefined, column.format === "text" ? "text" : "number");
      const button = make("button", column.title);
      button.type = "button";
      button.title = "Sort by this column";
      button.addEventListener("click", () => sort(found.id, index, column.format !== "text"));
      head.scope = "col";
      head.append(button);
      return head;
    }));
  }
  if (hasButtons && line.cells.length === titles.length) line.append(make("td"));
  const order = sorted[found.id];
  titles.forEach((_, index) => line.cells[index].setAttribute(
    "aria-sort", order?.index !== index ? "none" : order.falls ? "descending" : "ascending"));
}

// The first click sorts numbers from the largest, text from A; the second one the other way; the third one not.
function sort(id, index, falls) {
  const order = sorted[id];
  if (order?.index !== index) sorted[id] = { index, falls, turns: 1 };
  else if (order.turns === 1) sorted[id] = { index, falls: !falls, turns: 2 };
  else delete sorted[id];
  show();
}

function compared(one, other) {
  return typeof (one ?? other) === "string" ? (one ?? "").localeCompare(other ?? "") : (one ?? -1) - (other ?? -1);
}

function rows(found, body, isOperator) {
  const order = sorted[found.id];
  const wanted = order ? found.rows.toSorted((one, other) =>
    (order.falls ? -1 : 1) * compared(one.cells[order.index], other.cells[order.index])) : found.rows;
  const before = new Map([...body.rows].map((line) => [line.dataset.name, line]));
  const lines = wanted.map((row) => {
    const texts = row.cells.filter((_, index) => found.columns[index].format === "text");
    const name = JSON.stringify(row.action ? row.action.target : texts);
    const line = before.get(name) ?? make("tr");
    before.delete(name);
    line.dataset.name = name;
    fill(line, row, found.columns, isOperator);
    return line;
  });
  for (const line of [...body.rows]) if (!lines.includes(line)) line.remove();
  const focused = document.activeElement;
  lines.forEach((line, index) => {
    if (body.rows[index] !== line) body.insertBefore(line, body.rows[index] ?? null);
  });
  if (focused !== document.activeElement && focused.isConnected) focused.focus();
}

function fill(line, row, columns, isOperator) {
  columns.forEach((column, index) => {
    const cell = line.cells[index] ?? line.insertCell();
    const value = row.cells[index];
    cell.className = column.format === "text" ? "text" : "number";
    if (column.is_problem && value) cell.classList.add("warning");
    write(cell, shown(column, value));
  });
  if (!isOperator || !row.action || line.cells.length > columns.length) return;
  const button = make("button", row.action.title);
  button.type = "button";
  button.setAttribute("aria-label", `${row.action.title} ${row.cells[0]}`);
  button.addEventListener("click", () => act(row.action));
  line.insertCell().append(button);
}

async function act(action) {
  if (!confirm(action.question)) return;
  try {
    say((await ask("act", { action: action.name, target: action.target })).said);
  } catch (error) {
    say(error.status ? error.message : "The server did not answer; it may have done it all the same.");
  }
  await show();
}

function tell(where, text) {
  write(find(where), text);
  find(where).hidden = !text;
}

function say(text) {
  clearTimeout(saidTimer);
  tell("said", text);
  saidTimer = setTimeout(() => tell("said", ""), SAID_MS);
}

function complain(text) {
  tell("problem", text);
}

function draw(state) {
  answered = Date.now();
  document.title = `djinn · ${state.about}`;
  write(find("about"), state.about + (state.up_s === undefined ? "" : ` · up ${duration(state.up_s)}`));
  complain(state.problem);
  find("charts").replaceChildren(...state.charts.map(chart));
  // A button that moves while it is pressed is not clicked.
  if (!document.querySelector("#tables :active")) state.tables.forEach((found) => table(found, state.is_operator));
  find("drain").hidden = !(state.is_operator && state.can_drain);
  write(find("leave"), !secret ? "Enter the operator's key" : state.is_operator ? "Forget the key" : "Forget the token");
  find("leave").hidden = false;
  find("content").classList.remove("old");
  find("content").hidden = false;
  find("enter").hidden = true;
}

async function show() {
  clearTimeout(timer);
  const own = ++turn;
  try {
    const state = await ask("state");
    if (own !== turn) return;  // the secret has changed since, or a later answer is awaited
    draw(state);
  } catch (error) {
    if (own !== turn) return;
    if (error.status === 401) {
      enter(secret ? error.message : "");
      return;
    }
    const age = answered ? ` What is shown is ${duration((Date.now() - answered) / 1000)} old.` : "";
    complain(error.status ? error.message : `The server does not answer.${age}`);
    find("content").classList.add("old");
    find("drain").hidden = true;
  }
  timer = setTimeout(show, EVERY_MS);
}

function enter(reason) {
  clearTimeout(timer);
  turn += 1;
  secret = "";
  sessionStorage.removeItem(KEY);
  complain(reason);
  tell("said", "");
  find("tables").replaceChildren();
  for (const id of ["content", "drain", "leave"]) find(id).hidden = true;
  find("enter").hidden = false;
  find("secret").focus();
}

find("enter").addEventListener("submit", (event) => {
  event.preventDefault();
  secret = find("secret").value;
  find("secret").value = "";
  if (secret) sessionStorage.setItem(KEY, secret);
  show();
});
find("leave").addEventListener("click", () => enter(""));
find("drain").addEventListener("click", () => act({
  name: "drain", target: "", question: "Refuse new sessions, and end the server when the last one has ended?",
}));
show();
