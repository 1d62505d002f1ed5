// The gateway over HTTP: what it serves, a chat as it streams, its numbers.

import { BrokenOff, eventData } from "./sse.js";

const KEY = "odriver.key";

/** What went wrong, with what the gateway said of it; status is 0 where nothing answered. */
export class GatewayError extends Error {
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** The API key, kept until this tab is closed. */
export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** The models, by their first names: further names are of the same. */
export async function models() {
  const response = await ask("v1/models");
  return (await response.json()).data.filter((model) => model.id === model.root);
}

/** The numbers, as Prometheus reads them. */
export async function metricsText(signal) {
  const response = await ask("metrics", { signal });
  return response.text();
}

/**
 * What a chat completion says, as it comes: {text}, {reasoning}, {finish}, {usage, timings}. Raises GatewayError, BrokenOff, and
 * AbortError where the signal says so, which hangs up.
 */
export async function* chat(body, signal) {
  const whole = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(whole), signal });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    yield* newsOf(JSON.parse(data));
  }
  throw new BrokenOff("no [DONE]");
}

function* newsOf(chunk) {
  if (chunk.error) throw new GatewayError(chunk.error.message, { status: Number(chunk.error.code) || 500 });
  if (chunk.usage) yield { usage: chunk.usage, timings: chunk.timings };
  for (const { delta, finish_reason: finish } of chunk.choices) {
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) yield { reasoning };
    if (delta.content) yield { text: delta.content };
    if (finish) yield { finish };
  }
}

async function ask(path, options = {}) {
  const headers = apiKey() ? { Authorization: `Bearer ${apiKey()}` } : {};
  if (options.body) headers["Content-Type"] = "application/json";
  const response = await reach(path, { ...options, headers });
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new GatewayError("the gateway does not answer");
  }
}

async function errorOf(response) {
  const { status } = response;
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  const text = await response.text();
  return new GatewayError(messageIn(text) ?? response.statusText, { status, retryAfter });
}

/** In OpenAI's shape; what stands between us and the gateway may answer in any other. */
function messageIn(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return null;
  }
}
