"use strict";
// State is in `at`; every change goes through show(), which draws what depends on it.
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const N = data.tokens.length;
const RAMPS = { light: data.ramp, dark: ["#161b22", "#18375c", "#1f5ca3", "#4a94e6", "#a3cffb", "#f2f8ff"] };
const at = { layer: 0, head: 0, token: Math.max(0, data.tokens.findLastIndex((token) => token.kind !== "faint")), hover: null, direction: "from", sort: null, descending: true };
let weights; // Uint8Array: a (N, N) table per layer and head, rows look at columns; 255 * sqrt(weight)
let colors, inks; // for each of the 256 bytes: [r, g, b], and the colour of letters on it
let drawn = {}; // the picture in the map, and of which weights

const share = (byte) => (byte / 255) ** 2;
const percent = (x) => (x >= 0.0995 ? Math.round(100 * x) : (100 * x).toFixed(1)) + " %";
const layerNow = () => data.layers[at.layer];
const tokenNow = () => at.hover ?? at.token;
const nameOf = (i) => data.tokens[i].name ?? data.tokens[i].text;

function table(layer, head) {
  const before = data.layers.slice(0, layer).reduce((sum, l) => sum + l.heads.length, 0);
  const start = (before + head) * N * N;
  return weights.subarray(start, start + N * N);
}

const weightOf = (map, token, other) => (at.direction === "from" ? map[token * N + other] : map[other * N + token]);

// ---------------------------------------------------------------------------------------------------- colours

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";
const css = (name) => getComputedStyle($("main")).getPropertyValue(name);

function mixColors() {
  const stops = RAMPS[isDark() ? "dark" : "light"].map((hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)));
  colors = Array.from({ length: 256 }, (_, byte) => {
    const x = (byte / 255) * (stops.length - 1), k = Math.min(Math.floor(x), stops.length - 2);
    return stops[k].map((low, c) => Math.round(low + (x - k) * (stops[k + 1][c] - low)));
  });
  inks = colors.map((rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
  });
}

function picture(bytes, columns, rows) {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(columns, rows), pixels = new Uint32Array(image.data.buffer);
  const words = new Uint32Array(new Uint8Array(colors.flatMap((rgb) => [...rgb, 255])).buffer); // in this machine's order
  for (let i = 0; i < bytes.length; i++) pixels[i] = words[bytes[i]];
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// ---------------------------------------------------------------------------------------------------- the parts

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function quoted(i) {
  const token = element("span", { class: "t" }, data.tokens[i].text);
  return [token, element("span", { class: "at" }, String(i))];
}

function buildPicker() {
  const picker = $("picker"), columns = [...new Set(data.layers.flatMap((layer) => layer.heads))].sort((a, b) => a - b);
  picker.style.setProperty("--heads", columns.length);
  const header = element("div", { role: "row" }, element("span", { class: "label", role: "columnheader", "aria-label": "layer" }));
  for (const head of columns) header.append(element("span", { class: "label", role: "columnheader", "aria-label": `head ${head}` }, `H${head}`));
  picker.append(header);
  data.layers.forEach((layer, l) => {
    const row = element("div", { role: "row" }, element("span", { class: "label", role: "rowheader", "aria-label": `layer ${layer.layer}` }, `L${layer.layer}`));
    for (const head of columns) {
      const h = layer.heads.indexOf(head);
      if (h < 0) {
        row.append(element("span", { role: "presentation" }));
        continue;
      }
      const name = `layer ${layer.layer}, head ${head}`;
      const cell = element("div", { role: "gridcell", tabindex: -1, "aria-label": name, title: name, "data-layer": l, "data-head": h });
      cell.append(element("canvas", { "aria-hidden": "true" }));
      row.append(cell);
    }
    picker.append(row);
  });
}

function drawPicker() { // each cell of a thumbnail is the largest weight in its tile
  const size = Math.min(N, 56);
  for (const cell of $("picker").querySelectorAll("[role=gridcell]")) {
    const map = table(+cell.dataset.layer, +cell.dataset.head);
    const small = new Uint8Array(size * size);
    for (let i = 0; i < N; i++) {
      const row = Math.floor((i * size) / N) * size;
      for (let j = 0; j < N; j++) {
        const k = row + Math.floor((j * size) / N);
        if (map[i * N + j] > small[k]) small[k] = map[i * N + j];
      }
    }
    const canvas = cell.firstChild;
    canvas.width = canvas.height = size;
    canvas.getContext("2d").drawImage(picture(small, size, size), 0, 0);
  }
}

function buildText() {
  $("text").classList.toggle("words", data.words);
  data.tokens.forEach((token, i) => {
    const made = element("span", { class: `token ${token.kind ?? ""}`, role: "option", id: `t${i}`, "data-token": i });
    made.append(element("span", {}, token.text));
    if (token.name) made.setAttribute("aria-label", token.name);
    made.title = `${nameOf(i)} (${i})`;
    $("text").append(made);
    if (token.breaks) $("text").append(element("br"));
  });
}

function drawText() {
  const map = table(at.layer, at.head), token = tokenNow();
  for (const made of $("text").querySelectorAll(".token")) {
    const i = +made.dataset.token, byte = weightOf(map, token, i);
    made.style.background = byte ? `rgb(${colors[byte]})` : "";
    made.style.color = byte ? inks[byte] : "";
    made.classList.toggle("picked", i === token);
    made.setAttribute("aria-selected", i === token);
  }
  $("text").setAttribute("aria-activedescendant", `t${token}`);
}

function drawReadout() {
  const map = table(at.layer, at.head), token = tokenNow();
  const found = data.tokens.map((_, i) => [weightOf(map, token, i), i]).filter(([byte]) => share(byte) >= 0.0005);
  found.sort((a, b) => b[0] - a[0] || b[1] - a[1]);
  const from = at.direction === "from", name = [...quoted(token)];
  $("sentence").replaceChildren(
    ...(found.length
      ? from ? [...name, " looks most at"] : ["Looking most at ", ...name]
      : [...name, from ? " looks at nothing" : " is looked at by nobody"]),
  );
  $("strongest").replaceChildren(...found.slice(0, 6).map(([byte, i]) => {
    const line = element("span", { class: "line", "aria-hidden": "true" }, element("i"));
    line.firstChild.style.width = `${100 * share(byte)}%`;
    return element("li", {}, element("span", {}, ...quoted(i)), line, element("span", { class: "share" }, percent(share(byte))));
  }));
}

// ---------------------------------------------------------------------------------------------------- the map

const edge = { left: 46, top: 4, right: 4, bottom: 46 }; // CSS pixels around the cells

function mapCells() { // and whether tokens fit beside them, or numbers do
  const box = $("map").getBoundingClientRect(), size = Math.min(12, (box.width - 60) / N);
  const longest = Math.max(...data.tokens.map((token) => [...token.text].length));
  const letters = size >= 8.5 && longest * size * 0.62 < 0.16 * box.width;
  edge.left = edge.bottom = letters ? Math.max(46, longest * size * 0.62 + 30) : 46;
  return { box, letters, size, turned: longest > 1, width: box.width - edge.left - edge.right, height: box.height - edge.top - edge.bottom };
}

function drawMap() {
  const canvas = $("map"), { box, letters, size, turned, width, height } = mapCells(), scale = devicePixelRatio || 1;
  canvas.width = Math.round(box.width * scale);
  canvas.height = Math.round(box.height * scale);
  const pen = canvas.getContext("2d"), cell = width / N;
  pen.scale(scale, scale);
  pen.imageSmoothingEnabled = false;
  if (drawn.layer !== at.layer || drawn.head !== at.head || drawn.colors !== colors) {
    drawn = { layer: at.layer, head: at.head, colors, picture: picture(table(at.layer, at.head), N, N) };
  }
  pen.drawImage(drawn.picture, edge.left, edge.top, width, height);
  pen.strokeStyle = css("--rule");
  pen.strokeRect(edge.left - 0.5, edge.top - 0.5, width + 1, height + 1);

  pen.fillStyle = css("--muted");
  pen.font = letters ? `${size}px ${css("--mono")}` : "11px system-ui, sans-serif";
  const step = letters ? 1 : [1, 2, 5, 10, 20, 25, 50, 100, 200].find((s) => s * cell >= 30) ?? 500;
  pen.textBaseline = "middle";
  for (let i = 0; i < N; i += step) {
    const text = letters ? data.tokens[i].text : String(i), middle = (i + 0.5) * cell;
    pen.textAlign = "right";
    pen.fillText(text, edge.left - 6, edge.top + middle);
    pen.save();
    pen.translate(edge.left + middle, edge.top + height + (letters && turned ? 6 : 11));
    if (letters && turned) pen.rotate(-Math.PI / 2);
    pen.textAlign = letters && turned ? "right" : "center";
    pen.fillText(text, 0, 0);
    pen.restore();
  }
  pen.textAlign = "center";
  pen.font = "12px system-ui, sans-serif";
  pen.fillText("token that is looked at", edge.left + width / 2, box.height - 12);
  pen.save();
  pen.translate(10, edge.top + height / 2);
  pen.rotate(-Math.PI / 2);
  pen.fillText("token that looks", 0, 0);
  pen.restore();

  const token = tokenNow();
  pen.strokeStyle = css("--picked");
  pen.lineWidth = 1.5;
  if (at.direction === "from") pen.strokeRect(edge.left - 1, edge.top + token * cell - 1, width + 2, cell + 2);
  else pen.strokeRect(edge.left + token * cell - 1, edge.top - 1, cell + 2, height + 2);
  const layer = layerNow();
  canvas.setAttribute("aria-label", `Heat map of layer ${layer.layer}, head ${layer.heads[at.head]}: ${N} by ${N} weights; the text above tells them token by token.`);
}

function drawRamp() {
  const canvas = $("ramp");
  canvas.width = 256;
  canvas.height = 1;
  canvas.getContext("2d").drawImage(picture(Uint8Array.from({ length: 256 }, (_, i) => i), 256, 1), 0, 0);
}

function cellUnder(event) {
  const { box, width, height } = mapCells();
  const j = Math.floor(((event.clientX - box.left - edge.left) / width) * N);
  const i = Math.floor(((event.clientY - box.top - edge.top) / height) * N);
  return i >= 0 && j >= 0 && i < N && j < N ? [i, j] : null;
}

// ---------------------------------------------------------------------------------------------------- the table

const COLUMNS = [
  ["layer", "Layer"], ["head", "Head"], ["entropy", "Entropy", 2], ["distance", "Distance", 1],
  ["sink_mass", "First", "%"], ["previous_mass", "Prev.", "%"], ["self_mass", "Itself", "%"],
];

function buildTable() {
  for (const [key, title] of COLUMNS) {
    const button = element("button", { type: "button", "data-sort": key }, title);
    $("summary").tHead.rows[0].append(element("th", { scope: "col" }, button));
  }
  fillTable();
}

function fillTable() {
  const rows = data.summary.map((row, index) => ({ ...row, index }));
  const low = at.descending ? -Infinity : Infinity; // null (no row counted) is last either way
  if (at.sort) rows.sort((a, b) => ((a[at.sort] ?? low) - (b[at.sort] ?? low)) * (at.descending ? -1 : 1) || a.index - b.index);
  const largest = Object.fromEntries(COLUMNS.map(([key]) => [key, Math.max(...rows.map((row) => row[key] ?? 0))]));
  $("summary").tBodies[0].replaceChildren(...rows.map((row) => {
    const made = element("tr", { "data-layer": row.at[0], "data-head": row.at[1] });
    for (const [key, , form] of COLUMNS) {
      const value = row[key];
      const text = value == null ? "\u2013" : form === "%" ? Math.round(100 * value) + " %" : form ? value.toFixed(form) : String(value);
      const cell = element("td", {}, key === "layer" ? element("button", { tabindex: -1, "aria-label": `show layer ${row.layer}, head ${row.head}` }, text) : text);
      if (form) cell.style.setProperty("--part", form === "%" ? value ?? 0 : largest[key] ? (value ?? 0) / largest[key] : 0);
      made.append(cell);
    }
    return made;
  }));
  for (const button of $("summary").querySelectorAll("th button")) {
    const header = button.parentNode;
    if (button.dataset.sort === at.sort) header.setAttribute("aria-sort", at.descending ? "descending" : "ascending");
    else header.removeAttribute("aria-sort");
  }
}

// ---------------------------------------------------------------------------------------------------- state

function drawChoice() {
  const layer = layerNow();
  $("now").textContent = `layer ${layer.layer}, head ${layer.heads[at.head]}`;
  for (const cell of $("picker").querySelectorAll("[role=gridcell]")) {
    const chosen = +cell.dataset.layer === at.layer && +cell.dataset.head === at.head;
    cell.setAttribute("aria-selected", chosen);
    cell.tabIndex = chosen ? 0 : -1;
  }
  for (const row of $("summary").tBodies[0].rows) {
    const chosen = +row.dataset.layer === at.layer && +row.dataset.head === at.head;
    row.setAttribute("aria-current", chosen);
    row.querySelector("button").tabIndex = chosen ? 0 : -1;
    if (!chosen) continue;
    const frame = $("summary").parentNode, top = row.offsetTop - frame.scrollTop - $("summary").tHead.offsetHeight;
    if (top < 0) frame.scrollTop += top; // scrollIntoView would move the page, too
    else frame.scrollTop += Math.max(0, row.offsetTop + row.offsetHeight - frame.scrollTop - frame.clientHeight);
  }
}

function show(change) {
  Object.assign(at, change);
  if ("layer" in change || "head" in change) drawChoice();
  drawText();
  drawReadout();
  drawMap();
  if (at.hover === null) remember();
}

function remember() {
  const layer = layerNow();
  const hash = `#layer=${layer.layer}&head=${layer.heads[at.head]}&token=${at.token}${at.direction === "to" ? "&direction=to" : ""}`;
  try { history.replaceState(null, "", hash); } catch { /* some browsers refuse it for files */ }
}

function recall() {
  const hash = new URLSearchParams(location.hash.slice(1)), number = (name) => (hash.has(name) ? Number(hash.get(name)) : NaN);
  const layer = data.layers.findIndex((l) => l.layer === number("layer"));
  if (layer >= 0) at.layer = layer;
  const head = layerNow().heads.indexOf(number("head"));
  if (head >= 0) at.head = head;
  if (Number.isInteger(number("token")) && number("token") >= 0 && number("token") < N) at.token = number("token");
  if (hash.get("direction") === "to") at.direction = "to";
  document.querySelector(`input[name=direction][value=${at.direction}]`).checked = true;
}

function moveHead(down, right) {
  const layer = Math.min(Math.max(at.layer + down, 0), data.layers.length - 1), { heads } = data.layers[layer];
  const number = layerNow().heads[at.head], away = heads.map((head) => Math.abs(head - number));
  const head = down ? away.indexOf(Math.min(...away)) : at.head + right; // up and down: the nearest that was recorded
  show({ layer, head: Math.min(Math.max(head, 0), heads.length - 1), hover: null });
}

function moveToken(to) {
  show({ token: Math.min(Math.max(to, 0), N - 1), hover: null });
  $(`t${at.token}`).scrollIntoView({ block: "nearest" });
}

function tokenInLine(direction) { // the token above (-1) or below (1), as far to the right
  const here = $(`t${at.token}`), middle = here.offsetLeft + here.offsetWidth / 2;
  let best = null, line = null;
  for (let i = at.token + direction; i >= 0 && i < N; i += direction) {
    const other = $(`t${i}`);
    if (Math.abs(other.offsetTop - here.offsetTop) < here.offsetHeight / 2) continue;
    line ??= other.offsetTop;
    if (Math.abs(other.offsetTop - line) >= here.offsetHeight / 2) break;
    const distance = Math.abs(other.offsetLeft + other.offsetWidth / 2 - middle);
    if (best === null || distance < best[0]) best = [distance, i];
  }
  return best ? best[1] : at.token;
}

const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function listen() {
  document.addEventListener("keydown", (event) => {
    const arrow = ARROWS[event.key];
    if (event.ctrlKey || event.altKey || event.metaKey || !$("main").offsetParent) return;
    if (arrow && (event.shiftKey || event.target.closest("#picker"))) {
      moveHead(...arrow);
      if (event.target.closest("#picker")) $("picker").querySelector("[aria-selected=true]").focus();
    } else if (event.target.id === "text") {
      const to = {
        ArrowLeft: at.token - 1, ArrowRight: at.token + 1, Home: 0, End: N - 1, PageUp: at.token - 10, PageDown: at.token + 10,
      }[event.key];
      if (to !== undefined) moveToken(to);
      else if (arrow) moveToken(tokenInLine(arrow[0]));
      else return;
    } else if (arrow && arrow[0] && event.target.closest("tbody")) {
      const row = event.target.closest("tr"), next = arrow[0] < 0 ? row.previousSibling : row.nextSibling;
      if (!next) return;
      show({ layer: +next.dataset.layer, head: +next.dataset.head });
      next.querySelector("button").focus();
    } else return;
    event.preventDefault();
  });

  $("picker").addEventListener("click", (event) => {
    const cell = event.target.closest("[role=gridcell]");
    if (cell) show({ layer: +cell.dataset.layer, head: +cell.dataset.head });
  });
  $("summary").addEventListener("click", (event) => {
    const key = event.target.dataset.sort, row = event.target.closest("tbody tr");
    if (key) {
      at.descending = at.sort === key ? !at.descending : !["layer", "head"].includes(key);
      at.sort = key;
      fillTable();
      drawChoice();
    } else if (row) show({ layer: +row.dataset.layer, head: +row.dataset.head });
  });
  document.addEventListener("change", (event) => {
    if (event.target.name === "direction") show({ direction: event.target.value });
  });

  // a mouse shows what it is over and a click keeps it; a finger keeps what it is on
  const under = (event) => document.elementFromPoint(event.clientX, event.clientY)?.closest?.(".token");
  const text = $("text");
  text.addEventListener("pointermove", (event) => {
    const made = under(event), token = made ? +made.dataset.token : null;
    if (token === null || token === tokenNow()) return;
    show(event.pointerType === "mouse" ? { hover: token } : { token, hover: null });
  });
  text.addEventListener("pointerleave", () => at.hover !== null && show({ hover: null }));
  text.addEventListener("click", (event) => {
    const made = under(event);
    if (made) show({ token: +made.dataset.token, hover: null });
  });

  const map = $("map");
  const read = (event) => {
    const cell = cellUnder(event);
    if (!cell) return leave();
    const [i, j] = cell, byte = table(at.layer, at.head)[i * N + j];
    $("cell").replaceChildren(...quoted(i), " \u2192 ", ...quoted(j), `: ${percent(share(byte))}`);
    const token = at.direction === "from" ? i : j;
    if (token !== tokenNow()) show({ hover: token });
  };
  const leave = () => {
    $("cell").textContent = "";
    if (at.hover !== null) show({ hover: null });
  };
  map.addEventListener("pointermove", read);
  map.addEventListener("pointerleave", leave);
  map.addEventListener("click", (event) => {
    const cell = cellUnder(event);
    if (cell) show({ token: cell[at.direction === "from" ? 0 : 1], hover: null });
  });

  $("theme").addEventListener("click", () => {
    const root = document.documentElement.dataset, names = { auto: "Auto", light: "Light", dark: "Dark" };
    const next = { auto: prefersDark.matches ? "light" : "dark", light: "dark", dark: "light" }[root.theme ?? "auto"];
    root.theme = next;
    $("theme").textContent = names[next];
    $("theme").setAttribute("aria-label", `Theme: ${next}`);
    drawAll();
  });
  prefersDark.addEventListener("change", drawAll);
  new ResizeObserver(drawMap).observe(map);
}

function drawAll() {
  mixColors();
  drawRamp();
  drawPicker();
  show({ layer: at.layer });
}

async function unpack() {
  const packed = Uint8Array.from(atob(data.weights), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

unpack().then((bytes) => {
  weights = bytes;
  $("main").hidden = false;
  recall();
  buildPicker();
  buildText();
  buildTable();
  listen();
  drawAll();
  document.documentElement.dataset.ready = "";
}).catch((error) => {
  $("problem").textContent = `The page cannot be shown (${error.message}). It needs a browser of 2024 or later.`;
  $("problem").hidden = false;
  throw error;
});
