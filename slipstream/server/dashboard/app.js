// Asks for the engine's state four times a second while somebody can see the page, and draws it.

import { Line, duration, number, tile } from "./charts.js";
import { showPlan } from "./plan.js";
import { RowTable, STATES } from "./rows.js";
import { Timeline, figures, named } from "./timeline.js";

const EVERY_MS = 250;
const RETRY_MS = 1500;
const RATE_MS = 1500; // rates are over so long
const KEY = "slipstream-key";
const $ = (id) => document.getElementById(id);

const rows = new RowTable($("rows"), $("tip"), $("rows-said"));
const timeline = new Timeline($("timeline"), $("window"));
const tiles = {
  tokens: tile($("tiles"), "Output", "Tokens delivered a second"),
  rows: tile($("tiles"), "Rows in use", "Requests that own a row of the table"),
  queue: tile($("tiles"), "Waiting", "Requests that wait for a row"),
  kv: tile($("tiles"), "KV blocks", "Share of the pool that requests hold"),
  step: tile($("tiles"), "Device step", "Median time of a step on the device"),
  host: tile($("tiles"), "Host step", "Median time that the host spends on a step"),
  idle: tile($("tiles"), "Device idle", "Share of time without a step on the device while there was work"),
  accept: tile($("tiles"), "Acceptance", "Share of draft tokens taken, and by position in the draft"),
};
const percent = (value) => `${number(100 * value, value < 0.1 && value > 0 ? 1 : 0)} %`;
const lines = {
  tokens: new Line($("charts"), "Output tokens a second", "decode"),
  computed: new Line($("charts"), "Computed tokens a second", "prefill"),
  rows: new Line($("charts"), "Rows in use", "launch"),
  queue: new Line($("charts"), "Waiting", "apply"),
  kv: new Line($("charts"), "KV blocks", "plan", 1, percent),
  accept: new Line($("charts"), "Acceptance", "draft", 1, percent),
};
const legend = STATES.map((name) => {
  const item = document.createElement("li");
  const key = document.createElement("i");
  key.className = `key ${name}`;
  const count = document.createElement("b");
  item.append(key, name, count);
  $("legend").append(item);
  return count;
});

let paused = false;
let timer = 0;
let asking = false;
let history = []; // [milliseconds, stats], no older than RATE_MS but for one
let planShown = false;
let labelled = 0;

function status(state, text) {
  $("status").dataset.state = state;
  if ($("status-text").textContent !== text) $("status-text").textContent = text;
}

class Locked extends Error {}

async function get(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 401) throw new Locked();
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `status ${answer.status}`);
  return body;
}

async function poll() {
  clearTimeout(timer);
  if (asking || paused || document.hidden) return;
  asking = true;
  let wait = EVERY_MS;
  try {
    const state = await get("/v1/engine/state");
    if (!planShown) {
      showPlan(await get("/v1/engine/plan"));
      planShown = true;
    }
    if (!paused) {
      show(state);
      if (state.late_seconds > 0) status("late", `a step takes long: ${number(state.late_seconds, 1)} s old`);
      else status("live", state.stats.num_running ? "live" : "live, no requests");
    }
  } catch (error) {
    wait = RETRY_MS;
    if (error instanceof Locked) {
      status("locked", "an API key is needed");
      ask();
      wait = 0;
    } else {
      status("lost", error instanceof TypeError ? "no answer, asking again" : error.message);
    }
  }
  asking = false;
  if (wait) timer = setTimeout(poll, wait);
}

// Per second, of a counter of the stats; null until there are two looks.
function rate(name) {
  const [from, to] = [history[0], history[history.length - 1]];
  return to[0] > from[0] ? ((to[1][name] - from[1][name]) * 1000) / (to[0] - from[0]) : null;
}

function remember(now, stats) {
  // An engine that was started anew counts from zero.
  if (history.length && stats.steps < history[history.length - 1][1].steps) history = [];
  history.push([now, stats]);
  while (history.length > 2 && history[1][0] <= now - RATE_MS) history.shift();
}

function show(state) {
  const now = state.time * 1000;
  const stats = state.stats;
  document.title = `Slipstream, ${state.model}`;
  $("model").textContent = state.model;
  $("model").title = `${state.model}, Slipstream ${state.version}`;
  remember(now, stats);
  const counts = rows.show(state);
  counts.forEach((count, i) => (legend[i].textContent = number(count)));
  const steps = named(state.step_columns, state.steps);
  timeline.show(steps);
  const timing = figures(steps);
  showFigures(stats, counts, timing, steps.length > 0);
  addHistory(now, stats);
  if (now - labelled > 5000) {
    labelled = now;
    const text = STATES.map((name, i) => `${counts[i]} ${name}`).join(", ");
    $("rows").setAttribute("aria-label", `Row table, ${state.rows.phase.length} rows: ${text}`);
    $("timeline").setAttribute("aria-label", `Step timeline: ${$("steps-note").textContent}`);
  }
}

function showFigures(stats, counts, timing, any) {
  const tokens = rate("generation_tokens");
  tiles.tokens(tokens === null ? "\u2013" : number(tokens), "tok/s", `${number(stats.generation_tokens)} in all`);
  tiles.rows(number(stats.num_running), `of ${number(stats.num_rows)}`, `${number(counts[1])} prefill, ${number(counts[2] + counts[3])} decode`);
  tiles.queue(number(stats.num_waiting), "", `${number(stats.preemptions)} preempted in all`);
  const used = stats.num_blocks ? 1 - stats.free_blocks / stats.num_blocks : 0;
  tiles.kv(number(100 * used, 1), "%", `${number(stats.num_blocks - stats.free_blocks)} of ${number(stats.num_blocks)}`);
  tiles.step(...(any ? duration(timing.device) : ["\u2013", ""]), `${stats.steps_in_flight + 1} in flight`);
  tiles.host(...(any ? duration(timing.host) : ["\u2013", ""]), any ? `${percent(timing.overlap)} overlapped` : "");
  const idle = rate("device_idle_seconds");
  const busy = rate("device_busy_seconds");
  const share = idle !== null && idle + busy > 0 ? idle / (idle + busy) : null;
  tiles.idle(share === null ? "\u2013" : number(100 * share, 1), share === null ? "" : "%", `${number(stats.steps_starved)} of ${number(stats.steps)} starved`);
  const places = stats.accepted_per_position.map((count) => number((100 * count) / Math.max(1, stats.drafts)));
  const taken = stats.draft_tokens ? stats.accepted_tokens / stats.draft_tokens : null;
  tiles.accept(taken === null ? "\u2013" : number(100 * taken), taken === null ? "" : "%", taken === null ? "no drafts" : `by place ${places.join(" ")} %`);
  $("steps-note").textContent = any
    ? `${percent(timing.overlap)} of host time while the device runs`
    : "\u00a0";
}

function addHistory(now, stats) {
  lines.tokens.add(now, rate("generation_tokens"));
  lines.computed.add(now, rate("computed_tokens"));
  lines.rows.add(now, stats.num_running);
  lines.queue.add(now, stats.num_waiting);
  lines.kv.add(now, stats.num_blocks ? 1 - stats.free_blocks / stats.num_blocks : 0);
  const drafted = rate("draft_tokens");
  lines.accept.add(now, drafted ? rate("accepted_tokens") / drafted : null);
  for (const line of Object.values(lines)) line.draw();
}

function redraw() {
  rows.draw();
  timeline.draw();
  for (const line of Object.values(lines)) line.draw();
}

function ask() {
  if ($("ask").open) return;
  $("ask-key").value = "";
  $("ask-note").textContent = sessionStorage.getItem(KEY)
    ? "The server did not take this key. Another one stays in this tab."
    : "This server asks for a key. It stays in this tab.";
  $("ask").showModal();
}

$("ask").addEventListener("close", () => {
  if ($("ask").returnValue === "ok") {
    sessionStorage.setItem(KEY, $("ask-key").value.trim());
    poll();
  }
});
// Enter in the field means the second button.
$("ask-key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  $("ask").close("ok");
});
$("key").addEventListener("click", ask);
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "resume" : "pause";
  if (paused) status("paused", "paused");
  else poll();
});
$("theme").textContent = window.slipstreamTheme.get();
$("theme").addEventListener("click", () => ($("theme").textContent = window.slipstreamTheme.next()));
document.addEventListener("themechange", redraw);
document.addEventListener("visibilitychange", poll);
new ResizeObserver(redraw).observe($("rows"));
poll();
