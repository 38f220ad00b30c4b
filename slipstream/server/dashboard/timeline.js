// The last steps: what the host did above, what the device did below, and how much of it was at once.

import { begin, colour, duration, number } from "./charts.js";

const SHOWN = 14; // steps
const GUTTER = 48;
const HOST = { top: 30, height: 36 };
const DEVICE = { top: 98, height: 44 };

export function median(values) {
  if (!values.length) return 0;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[sorted.length >> 1];
}

// Rows of numbers as objects.
export function named(columns, rows) {
  return rows.map((row) => Object.fromEntries(columns.map((name, i) => [name, row[i]])));
}

// Of the steps: microseconds a step of host and device (medians), the share of host time during which the
// device ran, and the share of time between steps of one run of work in which it did not.
export function figures(steps) {
  let host = 0;
  let covered = 0;
  let first = 0;
  for (const step of steps) {
    for (const [from, to] of [[step.plan_begin, step.launch_end], [step.apply_begin, step.apply_end]]) {
      host += to - from;
      while (first < steps.length && steps[first].device_end < from - 1e6) first += 1;
      for (let i = first; i < steps.length && steps[i].device_begin < to; i += 1) {
        covered += Math.max(0, Math.min(to, steps[i].device_end) - Math.max(from, steps[i].device_begin));
      }
    }
  }
  return {
    host: median(steps.map((step) => step.launch_end - step.plan_begin + step.apply_end - step.apply_begin)),
    device: median(steps.map((step) => step.device_end - step.device_begin)),
    overlap: host > 0 ? Math.min(1, covered / host) : 0,
  };
}

export class Timeline {
  constructor(canvas, shown) {
    this.canvas = canvas;
    this.shown = shown;
    this.steps = [];
  }

  show(steps) {
    this.steps = steps;
    this.draw();
  }

  draw() {
    const { context, width, height } = begin(this.canvas);
    const paint = {};
    for (const name of ["plan", "launch", "apply", "device", "device-2", "idle", "line", "line-strong", "ink-2", "ink-3", "on-colour", "free"]) {
      paint[name] = colour(name);
    }
    const font = getComputedStyle(document.body).fontFamily;
    context.font = `12px ${font}`;
    context.textBaseline = "middle";
    context.fillStyle = paint["ink-2"];
    context.fillText("host", 0, HOST.top + HOST.height / 2);
    context.fillText("device", 0, DEVICE.top + DEVICE.height / 2);
    for (const lane of [HOST, DEVICE]) {
      context.fillStyle = paint.free;
      context.fillRect(GUTTER, lane.top, width - GUTTER, lane.height);
    }
    if (!this.steps.length) {
      this.shown.textContent = "no steps yet";
      return;
    }
    const end = this.steps[this.steps.length - 1].apply_end;
    const recent = this.steps.slice(-48);
    const period = Math.max(20, median(recent.slice(1).map((step, i) => step.device_end - recent[i].device_end)));
    const span = period * SHOWN;
    const x = (time) => GUTTER + ((time - (end - span)) / span) * (width - GUTTER);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER, height);
    context.clip();
    this.ticks(context, paint, span, width, font);
    const steps = this.steps.filter((step) => step.apply_end > end - span - period);
    steps.forEach((step, i) => this.device(context, paint, x, step, steps[i - 1], period));
    for (const step of steps) this.host(context, paint, x, step);
    context.restore();
    const [value, unit] = duration(span);
    this.shown.textContent = `${value} ${unit} shown`;
  }

  ticks(context, paint, span, width, font) {
    const unit = 10 ** Math.floor(Math.log10(span / 3));
    const every = [1, 2, 5, 10].map((n) => n * unit).find((n) => span / n <= 6);
    context.font = `11px ${font}`;
    context.textAlign = "center";
    for (let back = every; back < span; back += every) {
      const at = Math.round(GUTTER + (1 - back / span) * (width - GUTTER)) + 0.5;
      context.strokeStyle = paint.line;
      context.beginPath();
      context.moveTo(at, 18);
      context.lineTo(at, DEVICE.top + DEVICE.height + 8);
      context.stroke();
      if (at < GUTTER + 24) continue;
      const [value, name] = duration(back);
      context.fillStyle = paint["ink-3"];
      context.fillText(`\u2212${value.replace(/\.0+$/, "")} ${name}`, at, DEVICE.top + DEVICE.height + 20);
    }
  }

  host(context, paint, x, step) {
    for (const [name, from, to] of [
      ["plan", step.plan_begin, step.launch_begin], ["launch", step.launch_begin, step.launch_end], ["apply", step.apply_begin, step.apply_end],
    ]) {
      context.fillStyle = paint[name];
      context.fillRect(x(from), HOST.top, Math.max(1, x(to) - x(from)), HOST.height);
    }
    // From the launch to the beginning of the work: the longer, the further the host is ahead.
    context.strokeStyle = paint["line-strong"];
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x(step.launch_end), HOST.top + HOST.height);
    context.lineTo(x(step.device_begin), DEVICE.top);
    context.stroke();
  }

  device(context, paint, x, step, before, period) {
    const { top, height } = DEVICE;
    const left = x(step.device_begin);
    const right = x(step.device_end);
    const gap = before ? step.device_begin - before.device_end : 0;
    if (gap > 0 && gap < 20 * period) {
      context.fillStyle = paint.idle;
      context.fillRect(x(before.device_end), top, left - x(before.device_end), height);
    }
    context.fillStyle = step.step % 2 ? paint.device : paint["device-2"];
    context.fillRect(left, top, Math.max(1, right - left - 0.5), height);
    if (right - left > 54) {
      context.fillStyle = paint["on-colour"];
      context.textAlign = "left";
      context.fillText(`${number(step.tokens)} tok`, Math.max(left, GUTTER) + 6, top + height / 2);
    }
  }
}
