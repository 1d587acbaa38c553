// The data of this page, and how its words and numbers are written.

const data = JSON.parse(document.getElementById("graph").textContent);

const PHASES = ["forward", "llm_prefill", "llm_decode", "vision_encoding", "vision_decoding", "multimodal_fusion",
  "training_forward", "backward", "optimizer_step", "unknown"];
const RESIDENCIES = ["persistent_weight", "ephemeral_activation", "stateful_kv_cache", "gradient", "optimizer_state", "input",
  "unknown"];
const WORDS = { llm_prefill: "prefill", llm_decode: "decode", ephemeral_activation: "activation",
  persistent_weight: "weight", stateful_kv_cache: "KV cache", kv_cache: "KV cache", mlp: "MLP", moe: "mixture of experts",
  llm: "language model", conv_block: "convolution", encoder_decoder: "encoder-decoder" };

data.nodes = data.nodes.map((given, position) => ({
  position, call: -1, phase: "unknown", residency: "unknown", memory: "sequential", flops: 0, read: 0, written: 0,
  inputs: [], outputs: [], ...given, matches: [],
}));
for (const match of data.matches) for (const position of match.nodes) data.nodes[position].matches.push(match);
data.most = { flops: 1, bytes: 1 };
for (const node of data.nodes) {
  data.most = { flops: Math.max(data.most.flops, node.flops), bytes: Math.max(data.most.bytes, node.read + node.written) };
}
data.consumers = new Map();
for (const [source, target, value] of data.edges) {
  if (!data.consumers.has(source)) data.consumers.set(source, []);
  data.consumers.get(source).push([target, value]);
}
data.producer = new Map();
for (const node of data.nodes) for (const value of node.outputs) data.producer.set(value, node.position);

function plain(word) {
  return WORDS[word] || word.replaceAll("_", " ");
}

function shortName(operation) {
  return operation.split("::").pop().split(".")[0];
}

function amount(number, unit) {
  if (number < 1000) return `${number}${unit ? ` ${unit}` : ""}`;
  const power = Math.min(5, Math.floor(Math.log10(number) / 3 + 1e-9));
  const scaled = number / 1000 ** power;
  return `${scaled >= 100 ? scaled.toFixed(0) : scaled.toFixed(1)} ${["", "k", "M", "G", "T", "P"][power]}${unit}`;
}

function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function shapeOf(shape) {
  if (!shape) return "";
  return shape.length ? shape.join("×") : "scalar";
}

function tone(kind, name) {
  return `var(--${kind}-${name})`;
}

function make(tag, attributes = {}, ...children) {
  // Text only ever becomes text: nothing of the data is read as HTML.
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "tone") element.style.setProperty("--tone", value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}
