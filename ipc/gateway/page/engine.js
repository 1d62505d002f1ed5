// The live view of the engine: what two looks at /metrics, a second apart, say of it.

import { byId } from "./dom.js";
import { metricsText } from "./gateway.js";
import { explain } from "./problems.js";
import { Look, parseMetrics, quantile, rate } from "./prometheus.js";
import { Sparkline } from "./sparkline.js";

const INTERVAL = 1000; // milliseconds
const WINDOW = 60; // seconds that latencies are of
const LATENCIES = {
  ttft: "vllm:time_to_first_token_seconds",
  itl: "vllm:inter_token_latency_seconds",
  e2e: "vllm:e2e_request_latency_seconds",
};

export class EngineView {
  #looks = [];
  #sparks = Object.fromEntries(
    ["rate", "running", "waiting"].map((name) => [name, new Sparkline(byId(`spark-${name}`))]),
  );

  /** model() is the name of the one that is looked at; onLook() is called when there was something to see. */
  constructor(model, onLook) {
    this.model = model;
    this.onLook = onLook;
  }

  /** For as long as somebody looks at the page. */
  async watch() {
    for (;;) {
      if (!document.hidden) await this.#look();
      await new Promise((resolve) => setTimeout(resolve, INTERVAL));
    }
  }

  async #look() {
    try {
      const text = await metricsText(AbortSignal.timeout(5 * INTERVAL));
      this.#take(new Look(parseMetrics(text), this.model(), performance.now() / 1000));
      this.onLook();
    } catch (error) {
      this.#say(`No live view. ${explain(error).what}`);
    }
  }

  #take(now) {
    if (this.#looks.at(-1)?.model !== now.model) this.#looks = [];
    this.#looks.push(now);
    while (this.#looks[0].at < now.at - WINDOW) this.#looks.shift();
    this.#say("");
    this.#showState(now);
    this.#showRates(now);
    this.#showPages(now);
    for (const [name, metric] of Object.entries(LATENCIES)) this.#showLatency(name, metric, now);
  }

  /** In place of the numbers; nothing where those are shown. */
  #say(what) {
    byId("engine-problem").textContent = what;
    byId("engine").classList.toggle("stale", what !== "");
  }

  #showState(now) {
    const state = now.state("odriver_state", "state") ?? "";
    byId("engine-state").textContent = state;
    byId("engine-state").dataset.state = state;
    byId("engine-uptime").textContent = duration(now.value("odriver_uptime_seconds"));
  }

  #showRates(now) {
    const before = this.#looks.at(-2) ?? now;
    const perSecond = rate(before, now, "vllm:generation_tokens_total");
    byId("rate").textContent = number(perSecond);
    byId("rate-short").textContent = perSecond === null ? "" : `${number(perSecond)} tok/s`;
    byId("prompt-rate").textContent = number(rate(before, now, "odriver_prompt_tokens_computed_total"));
    this.#sparks.rate.push(perSecond);
    for (const name of ["running", "waiting"]) {
      const value = now.value(`vllm:num_requests_${name}`);
      byId(name).textContent = number(value);
      this.#sparks[name].push(value);
    }
  }

  #showPages(now) {
    const total = now.value("odriver_pages");
    const free = now.value("odriver_pages_free");
    const cached = now.value("odriver_pages_cached");
    const used = total === null ? null : Math.max(0, total - free - cached);
    const share = (part) => (total ? part / total : 0);
    byId("pages-used").setAttribute("width", 100 * share(used));
    byId("pages-cached").setAttribute("width", 100 * share(used + cached));
    byId("pages").textContent = total === null ? "–" : `${percent(share(used))} of ${number(total)}`;
    byId("pages-kept").textContent = total === null ? "–" : percent(share(cached));
    const queries = now.value("vllm:prefix_cache_queries_total");
    byId("hits").textContent = queries ? percent(now.value("vllm:prefix_cache_hits_total") / queries) : "–";
    byId("preemptions").textContent = number(now.value("vllm:num_preemptions_total"));
  }

  #showLatency(name, metric, now) {
    const [since] = this.#looks;
    byId(`${name}-p50`).textContent = time(quantile(since, now, metric, 0.5));
    byId(`${name}-p99`).textContent = time(quantile(since, now, metric, 0.99));
  }
}

function number(value) {
  if (value === null || Number.isNaN(value)) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: value > 0 && value < 10 ? 1 : 0 });
}

function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

/** Seconds, in the unit that fits. */
function time(seconds) {
  if (seconds === null) return "–";
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

function duration(seconds) {
  if (seconds === null) return "";
  const units = [["d", 86_400], ["h", 3600], ["min", 60], ["s", 1]];
  const [unit, length] = units.find(([, length]) => seconds >= length) ?? units.at(-1);
  return `up ${Math.floor(seconds / length)} ${unit}`;
}
