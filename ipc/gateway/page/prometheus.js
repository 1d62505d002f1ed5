// Prometheus' text format, and what can be said of two looks at it.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const SPECIAL = { "+Inf": Infinity, "-Inf": -Infinity, NaN };

/** The samples of a text by name: {labels, value} each. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!match) continue;
    const [, name, labels = "", value] = match;
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels: labelsOf(labels), value: SPECIAL[value] ?? Number(value) });
  }
  return samples;
}

/** One look at the numbers of a model: of its daemons together, where there are several. */
export class Look {
  constructor(samples, model, at) {
    this.at = at;
    this.samples = samples;
    this.model = model;
  }

  /** Those of the model; a metric without model names is everybody's. */
  of(name) {
    const all = this.samples.get(name) ?? [];
    return all.filter(({ labels }) => labels.model_name === undefined || labels.model_name === this.model);
  }

  /** The sum over its samples, or null where there are none. */
  value(name) {
    const found = this.of(name);
    return found.length ? found.reduce((sum, { value }) => sum + value, 0) : null;
  }

  /** The value of a label where the metric is 1. */
  state(name, label) {
    return this.of(name).find(({ value }) => value === 1)?.labels[label] ?? null;
  }

  /** How often the value was at most so much, by bound, from the least bound on: [bound, count] each. */
  buckets(name) {
    const counts = new Map();
    for (const { labels, value } of this.of(`${name}_bucket`)) {
      const bound = SPECIAL[labels.le] ?? Number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    return [...counts].sort(([one], [other]) => one - other);
  }
}

/** A counter's growth a second between two looks, or null; one that fell was started anew. */
export function rate(before, now, name) {
  const from = before.value(name);
  const to = now.value(name);
  if (from === null || to === null || now.at <= before.at) return null;
  return (to >= from ? to - from : to) / (now.at - before.at);
}

/** A quantile of what a histogram saw between two looks, linear within a bucket as Prometheus has it, or null. */
export function quantile(before, now, name, share) {
  const earlier = new Map(before.buckets(name));
  const buckets = now.buckets(name).map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const place = buckets.findIndex(([, count]) => count >= share * total);
  const [low, below] = place === 0 ? [0, 0] : buckets[place - 1];
  const [high, count] = buckets[place];
  if (high === Infinity) return low;
  return low + (high - low) * ((share * total - below) / (count - below || 1));
}

function labelsOf(text) {
  const pairs = [...text.matchAll(LABEL)].map(([, name, value]) => [name, value.replace(/\\(.)/g, unescaped)]);
  return Object.fromEntries(pairs);
}

function unescaped(_, char) {
  return char === "n" ? "\n" : char;
}
