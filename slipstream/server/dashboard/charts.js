// Canvas helpers, the figures at the top, and the lines of the last two minutes.

const KEPT_MS = 120_000;

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A context in CSS pixels at the screen's own resolution, cleared. Sizes come from the style sheet alone.
export function begin(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export function number(value, digits = 0) {
  return value.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// Microseconds or milliseconds with three digits that matter.
export function duration(us) {
  if (us < 1000) return [number(us, us < 10 ? 1 : 0), "µs"];
  if (us < 1e6) return [number(us / 1000, us < 1e4 ? 2 : us < 1e5 ? 1 : 0), "ms"];
  return [number(us / 1e6, 2), "s"];
}

export function tile(parent, label, title) {
  const box = document.createElement("dl");
  box.className = "tile";
  box.title = title;
  const name = document.createElement("dt");
  name.textContent = label;
  const value = document.createElement("dd");
  const sub = document.createElement("dd");
  sub.className = "sub";
  box.append(name, value, sub);
  parent.append(box);
  return (figure, unit = "", below = "") => {
    const small = document.createElement("small");
    small.textContent = unit;
    value.replaceChildren(figure, small);
    sub.textContent = below || "\u00a0";
  };
}

// A line over the last two minutes. full: the greatest value there can be; null: the greatest seen.
export class Line {
  constructor(parent, label, name, full = null, format = (value) => number(value)) {
    this.points = [];
    this.full = full;
    this.name = name;
    this.format = format;
    const box = document.createElement("div");
    box.className = "chart";
    const head = document.createElement("div");
    head.className = "label";
    const text = document.createElement("span");
    text.textContent = label;
    this.most = document.createElement("span");
    head.append(text, this.most);
    const frame = document.createElement("div");
    frame.className = "canvas";
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    frame.append(this.canvas);
    box.append(head, frame);
    parent.append(box);
    this.label = label;
  }

  add(time, value) {
    this.points.push([time, value]);
    while (this.points.length && this.points[0][0] < time - KEPT_MS) this.points.shift();
  }

  draw() {
    const { context, width, height } = begin(this.canvas);
    const values = this.points.map((point) => point[1]).filter((value) => value !== null);
    const top = this.full ?? Math.max(1e-9, ...values);
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    for (const y of [0.5, Math.round(height / 2) + 0.5, height - 0.5]) {
      context.beginPath();
      context.moveTo(0, y);
      context.lineTo(width, y);
      context.stroke();
    }
    if (!values.length) {
      this.most.textContent = "none yet";
      this.canvas.setAttribute("aria-label", `${this.label}: none yet`);
      return;
    }
    const last = values[values.length - 1];
    const now = this.points[this.points.length - 1][0];
    const x = (time) => width - ((now - time) / KEPT_MS) * width;
    const y = (value) => height - 1.5 - (Math.min(value, top) / top) * (height - 4);
    this.most.textContent = this.full === null ? `most ${this.format(top)}` : this.format(last);
    this.canvas.setAttribute("aria-label", `${this.label}: now ${this.format(last)}, most ${this.format(Math.max(...values))}`);
    context.beginPath();
    let drawing = false;
    let from = 0;
    let to = 0;
    for (const [time, value] of this.points) {
      if (value === null) {
        drawing = false;
        continue;
      }
      if (drawing) context.lineTo(x(time), y(value));
      else context.moveTo(x(time), y(value));
      if (!drawing && from === 0) from = x(time);
      to = x(time);
      drawing = true;
    }
    context.strokeStyle = colour(this.name);
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(to, height);
    context.lineTo(from, height);
    context.globalAlpha = 0.1;
    context.fillStyle = colour(this.name);
    context.fill();
    context.globalAlpha = 1;
  }
}
