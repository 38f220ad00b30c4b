// The row table: a cell a row. Few rows are drawn as strips that show their tokens, many as a grid.

import { begin, colour, number } from "./charts.js";

export const STATES = ["free", "prefill", "decode", "draft"];
const STRIPS_UP_TO = 32;
const GUTTER = 40;
const HINT = "Point at a row, or use the arrow keys, to see its request.";

// Where cells are: their number in a line, and their size in pixels.
export function layout(count, width, height) {
  if (count <= STRIPS_UP_TO) {
    const columns = count <= 16 ? 1 : 2;
    const lines = Math.ceil(count / columns);
    return { strips: true, columns, lines, w: Math.floor(width / columns), h: Math.min(56, Math.floor(height / lines)) };
  }
  let best = null;
  for (let columns = 8; columns <= 128; columns += 8) {
    const lines = Math.ceil(count / columns);
    const w = (width - GUTTER) / columns;
    const h = height / lines;
    const size = Math.min(w, h);
    if (!best || size > best.size) best = { strips: false, columns, lines, w: Math.min(w, 2 * h), h: Math.min(h, 2 * w), size };
  }
  return best;
}

export class RowTable {
  constructor(canvas, tip, said) {
    this.canvas = canvas;
    this.tip = tip;
    this.said = said;
    this.state = null;
    this.kinds = [];
    this.seen = new Map(); // row -> [request, drafted] of the last look
    this.at = -1;
    this.byKey = false;
    said.textContent = HINT;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.select(-1));
    canvas.addEventListener("keydown", (event) => this.press(event));
    canvas.addEventListener("blur", () => this.byKey && this.select(-1));
  }

  // A new state; returns how many rows are in each of STATES.
  show(state) {
    this.state = state;
    const { phase, drafted } = state.rows;
    const counts = [0, 0, 0, 0];
    this.kinds = phase.map((value, row) => {
      const owner = state.owners[row]?.id;
      const before = this.seen.get(row);
      const drafts = value === 2 && drafted[row] > (before && before[0] === owner ? before[1] : 0);
      this.seen.set(row, [owner, drafted[row]]);
      const kind = drafts ? 3 : value;
      counts[kind] += 1;
      return kind;
    });
    this.draw();
    if (this.at >= 0) this.fillTip();
    return counts;
  }

  draw() {
    if (!this.state) return;
    const { context, width, height } = begin(this.canvas);
    const count = this.kinds.length;
    this.grid = layout(count, width, height);
    const paint = {};
    for (const name of [...STATES, "prefill-soft", "decode-soft", "draft-soft", "ink", "ink-2", "ink-3", "panel"]) {
      paint[name] = colour(name);
    }
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    if (!this.grid.strips) {
      context.fillStyle = paint["ink-3"];
      context.textAlign = "right";
      const every = Math.ceil(14 / this.grid.h);
      for (let line = 0; line < this.grid.lines; line += every) {
        context.fillText(line * this.grid.columns, GUTTER - 8, line * this.grid.h + this.grid.h / 2 + 0.5);
      }
    }
    for (let row = 0; row < count; row += 1) {
      if (this.grid.strips) this.strip(context, paint, row);
      else this.cell(context, paint, row);
    }
    if (this.at >= 0 && this.at < count) {
      const { x, y, w, h } = this.place(this.at);
      context.strokeStyle = paint.ink;
      context.lineWidth = 1.5;
      context.beginPath();
      context.roundRect(x - 0.25, y - 0.25, w + 0.5, h + 0.5, 3);
      context.stroke();
    }
  }

  place(row) {
    const { strips, columns, lines, w, h } = this.grid;
    if (strips) return { x: Math.floor(row / lines) * w, y: (row % lines) * h + 2, w: w - (columns > 1 ? 12 : 0), h: h - 4 };
    const gap = Math.min(w, h) > 9 ? 2 : 1;
    // Edges on whole pixels, so that every gap is as wide as the others.
    const [column, line] = [row % columns, Math.floor(row / columns)];
    const [x, y] = [GUTTER + Math.round(column * w), Math.round(line * h)];
    return { x, y, w: GUTTER + Math.round((column + 1) * w) - gap - x, h: Math.round((line + 1) * h) - gap - y };
  }

  // How far a row is, 0 to 1: a prompt's tokens computed, then the output's of those it may have.
  progress(row) {
    const { length, computed, max_len: most } = this.state.rows;
    const prompt = this.state.owners[row]?.prompt ?? length[row];
    if (this.kinds[row] === 1) return computed[row] / Math.max(1, length[row]);
    return (length[row] - prompt) / Math.max(1, most[row] - prompt);
  }

  cell(context, paint, row) {
    const { x, y, w, h } = this.place(row);
    const name = STATES[this.kinds[row]];
    const radius = Math.min(3, w / 4);
    context.fillStyle = paint[name];
    context.globalAlpha = name === "free" ? 1 : 0.55;
    context.beginPath();
    context.roundRect(x, y, w, h, radius);
    context.fill();
    context.globalAlpha = 1;
    if (name === "free") return;
    const filled = Math.max(3, Math.round(h * Math.min(1, this.progress(row))));
    context.fillStyle = paint[name];
    context.beginPath();
    context.roundRect(x, y + h - filled, w, filled, radius);
    context.fill();
    if (name === "draft") this.notch(context, paint, x, y, w, Math.min(w, h) * 0.42);
  }

  // A cut corner, so that drafting rows are told by shape as well.
  notch(context, paint, x, y, w, size) {
    context.fillStyle = paint.panel;
    context.beginPath();
    context.moveTo(x + w - size, y - 0.5);
    context.lineTo(x + w + 0.5, y - 0.5);
    context.lineTo(x + w + 0.5, y + size);
    context.fill();
  }

  strip(context, paint, row) {
    const { x, y, w, h } = this.place(row);
    const name = STATES[this.kinds[row]];
    const { length, computed, max_len: most } = this.state.rows;
    const middle = y + h / 2;
    const free = name === "free";
    context.textAlign = "left";
    context.fillStyle = paint["ink-3"];
    context.fillText(row, x + 6, middle);
    context.fillStyle = free ? paint["ink-3"] : paint["ink-2"];
    context.fillText(name, x + 28, middle);
    const left = x + 78;
    const span = w - 78 - 138;
    const thick = Math.min(h - 6, 22);
    const top = middle - thick / 2;
    context.fillStyle = paint.free;
    context.beginPath();
    context.roundRect(left, top, span, thick, 3);
    context.fill();
    if (free) return;
    const prompt = this.state.owners[row]?.prompt ?? length[row];
    const scale = (tokens) => Math.max(2, (Math.min(tokens, most[row]) / Math.max(1, most[row])) * span);
    const ends = [[scale(length[row]), paint[name]], [scale(prompt), paint[`${name}-soft`]]];
    if (name === "prefill") ends.push([scale(computed[row]), paint.prefill]);
    if (name === "prefill") ends.shift();
    for (const [end, fill] of ends) {
      context.fillStyle = fill;
      context.beginPath();
      context.roundRect(left, top, end, thick, 3);
      context.fill();
    }
    if (name === "draft") this.notch(context, paint, left, top, scale(length[row]), thick * 0.45);
    context.textAlign = "right";
    context.fillStyle = paint["ink-2"];
    const done = name === "prefill" ? computed[row] : length[row];
    context.fillText(`${number(done)} / ${number(most[row])}`, x + w - 6, middle);
  }

  point(event) {
    if (!this.grid) return;
    const box = this.canvas.getBoundingClientRect();
    this.byKey = false;
    this.select(this.rowAt(event.clientX - box.left, event.clientY - box.top));
  }

  rowAt(x, y) {
    const { strips, columns, lines, w, h } = this.grid;
    const line = Math.floor(y / h);
    const column = Math.floor((strips ? x : x - GUTTER) / w);
    if (line < 0 || line >= lines || column < 0 || column >= columns) return -1;
    const row = strips ? column * lines + line : line * columns + column;
    return row < this.kinds.length ? row : -1;
  }

  press(event) {
    if (!this.grid) return;
    const down = this.grid.strips ? 1 : this.grid.columns;
    const aside = this.grid.strips ? this.grid.lines : 1;
    const last = this.kinds.length - 1;
    const from = this.at < 0 ? 0 : this.at;
    const targets = {
      ArrowRight: from + aside, ArrowLeft: from - aside, ArrowDown: from + down, ArrowUp: from - down, Home: 0, End: last, Escape: -1,
    };
    if (!(event.key in targets)) return;
    event.preventDefault();
    this.byKey = true;
    const target = this.at < 0 && event.key.startsWith("Arrow") ? 0 : targets[event.key];
    if (target <= last && (target >= 0 || event.key === "Escape")) this.select(target);
  }

  select(row) {
    if (row === this.at) return;
    this.at = row;
    this.tip.hidden = row < 0;
    if (row >= 0) this.fillTip();
    this.said.textContent = row >= 0 && this.byKey ? this.sentence(row) : HINT;
    this.draw();
  }

  facts(row) {
    const { length, computed, max_len: most, num_blocks: blocks, drafted, accepted } = this.state.rows;
    const owner = this.state.owners[row];
    const prompt = owner?.prompt ?? length[row];
    const facts = [
      ["prompt", `${number(prompt)} tokens`],
      ["from cache", `${number(owner?.cached ?? 0)} tokens`],
      ["output", `${number(Math.max(0, length[row] - prompt))} of ${number(Math.max(0, most[row] - prompt))} tokens`],
      ["computed", `${number(computed[row])} positions`],
      ["KV blocks", number(blocks[row])],
      ["drafts taken", drafted[row] ? `${number(accepted[row])} of ${number(drafted[row])}` : "none"],
    ];
    if (owner) facts.push(["since", `${number(owner.seconds, 1)} s`]);
    return facts;
  }

  sentence(row) {
    const name = STATES[this.kinds[row]];
    if (name === "free") return `Row ${row}: free`;
    const facts = this.facts(row).map(([label, value]) => `${label} ${value}`).join(", ");
    return `Row ${row}: ${name}, ${facts}, request ${this.state.owners[row]?.id ?? "unknown"}`;
  }

  fillTip() {
    const row = this.at;
    const name = STATES[this.kinds[row]] ?? "free";
    const head = document.createElement("h3");
    const key = document.createElement("i");
    key.className = `key ${name}`;
    head.append(key, `Row ${row}, ${name}`);
    const parts = [head];
    if (name !== "free") {
      const id = document.createElement("div");
      id.className = "id";
      id.textContent = this.state.owners[row]?.id ?? "";
      const list = document.createElement("dl");
      for (const [label, value] of this.facts(row)) {
        const term = document.createElement("dt");
        term.textContent = label;
        const what = document.createElement("dd");
        what.textContent = value;
        list.append(term, what);
      }
      parts.push(id, list);
    }
    this.tip.replaceChildren(...parts);
    const { x, y, w, h } = this.place(row);
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const wide = this.grid.strips;
    const left = wide ? Math.min(x + 90, width - 248) : x + w + 8 + 248 > width ? x - 256 : x + w + 8;
    const below = wide ? y + h + 2 : y;
    const tall = this.tip.offsetHeight;
    const top = below + tall > height ? Math.max(0, wide ? y - tall - 2 : height - tall) : below;
    this.tip.style.transform = `translate(${Math.round(Math.max(0, left))}px, ${Math.round(top)}px)`;
  }
}
