"use strict";
// The page asks for its data every second. It writes text only, never markup, and keeps the secret of this tab alone.

const EVERY_MS = 1000;
const KEY = "djinn-secret";
const find = (id) => document.getElementById(id);
let secret = sessionStorage.getItem(KEY) || "";
let timer = 0;

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
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
}

const FORMATS = {
  bytes: size, seconds: duration, count: (value) => value.toLocaleString("en"), text: (value) => value,
  rate: (value) => `${value.toFixed(1)}/s`, byte_rate: (value) => `${size(value)}/s`,
  part: (value) => `${(100 * value).toFixed(0)} %`,
};

async function ask(path, body) {
  const options = { headers: secret ? { Authorization: `Bearer ${secret}` } : {}, cache: "no-store" };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const response = await fetch(path, options);
  const content = await response.json();
  if (!response.ok) throw Object.assign(new Error(content.problem), { status: response.status });
  return content;
}

function chart(series) {
  const figure = make("figure");
  const caption = make("figcaption", series.title);
  const last = series.values.length ? series.values[series.values.length - 1] : 0;
  caption.append(make("b", FORMATS[series.format](last)));
  const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  drawing.setAttribute("viewBox", "0 0 100 40");
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-label", `${series.title}, the last ${duration(series.seconds)}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const top = Math.max(...series.values, 1e-9);
  const step = 100 / Math.max(series.values.length - 1, 1);
  line.setAttribute("points", series.values.map((value, index) =>
    `${(index * step).toFixed(2)},${(39 - 38 * value / top).toFixed(2)}`).join(" "));
  drawing.append(line);
  figure.append(caption, drawing);
  return figure;
}

function table(found, isOperator) {
  const section = make("section");
  section.append(make("h2", `${found.title} (${found.rows.length})`));
  const element = make("table");
  element.id = found.id;
  const head = element.createTHead().insertRow();
  for (const column of found.columns) {
    head.append(make("th", column.title, ...(column.format === "text" ? [] : ["number"])));
  }
  const body = element.createTBody();
  for (const row of found.rows) {
    const line = body.insertRow();
    row.cells.forEach((value, index) => {
      const column = found.columns[index];
      line.append(make("td", FORMATS[column.format](value), ...(column.format === "text" ? [] : ["number"]),
        ...(column.is_problem && value ? ["warning"] : [])));
    });
    if (isOperator && row.action) {
      const button = make("button", row.action.title);
      button.type = "button";
      button.addEventListener("click", () => act(row.action));
      line.insertCell().append(button);
    }
  }
  section.append(element);
  return section;
}

async function act(action) {
  if (!confirm(action.question)) return;
  try {
    tell("said", (await ask("act", { action: action.name, target: action.target })).said);
  } catch (error) {
    tell("said", error.message);
  }
  await show();
}

function tell(where, text) {
  find(where).textContent = text;
  find(where).hidden = !text;
}

function complain(text) {
  tell("problem", text);
}

function draw(state) {
  find("about").textContent = state.about;
  complain(state.problem);
  find("charts").replaceChildren(...state.charts.map(chart));
  // A button that is replaced while it is pressed is not clicked.
  if (!document.querySelector("#tables :active")) {
    find("tables").replaceChildren(...state.tables.map((found) => table(found, state.is_operator)));
  }
  find("drain").hidden = !(state.is_operator && state.can_drain);
  find("leave").hidden = !secret;
  find("content").hidden = false;
  find("enter").hidden = true;
}

async function show() {
  clearTimeout(timer);
  try {
    draw(await ask("state"));
  } catch (error) {
    if (error.status === 401) {
      enter(secret ? error.message : "");
      return;
    }
    complain(error.status ? error.message : "The server does not answer.");
  }
  timer = setTimeout(show, EVERY_MS);
}

function enter(reason) {
  secret = "";
  sessionStorage.removeItem(KEY);
  complain(reason);
  tell("said", "");
  for (const id of ["content", "drain", "leave"]) find(id).hidden = true;
  find("enter").hidden = false;
  find("secret").focus();
}

find("enter").addEventListener("submit", (event) => {
  event.preventDefault();
  secret = find("secret").value;
  find("secret").value = "";
  sessionStorage.setItem(KEY, secret);
  show();
});
find("leave").addEventListener("click", () => enter(""));
find("drain").addEventListener("click", () => act({
  name: "drain", target: "", question: "Refuse new sessions, and end the server when the last one has ended?",
}));
show();
