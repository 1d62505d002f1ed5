// What went wrong, in plain words, and what to do about it.

import { apiKey, GatewayError } from "./gateway.js";
import { BrokenOff } from "./sse.js";

/** Of an answer without an end. */
export const BROKEN_OFF = {
  what: "The answer broke off before its end.",
  advice: "The gateway went away, or this page was closed.",
};

/** {what, advice} of an error that a fetch or a stream ended with. */
export function explain(error) {
  if (error instanceof BrokenOff) return BROKEN_OFF;
  if (error.name === "TimeoutError") return unreachable("the gateway does not answer");
  if (!(error instanceof GatewayError)) return { what: `This page has a fault: ${error}.`, advice: "Reload it." };
  const { status, message } = error;
  if (status === 0) return unreachable(message);
  if (status === 401) {
    const what = apiKey() ? sentence(message) : "This gateway wants an API key.";
    return { what, advice: "Give it one, then try again.", wantsKey: true };
  }
  if (status === 403) return { what: sentence(message), advice: "Whoever runs the gateway can allow it." };
  if (status === 404) return { what: sentence(message), advice: "Choose a model that is served, then try again." };
  if (status === 413) return { what: sentence(message), advice: "Shorten the message, or begin a new conversation." };
  if (status === 429 || status === 503) return { what: sentence(message), advice: laterAdvice(error) };
  if (status < 500) return { what: sentence(message), advice: adviceFor(message) };
  return { what: sentence(message), advice: "This is the daemon's fault, and its log says more. Trying again may help." };
}

function unreachable(message) {
  const advice = "See that odriver gateway runs and that this machine reaches it, then try again.";
  return { what: sentence(message), advice };
}

function laterAdvice({ retryAfter, message }) {
  if (/again in/i.test(message)) return "";
  return retryAfter ? `Try again in ${retryAfter} s.` : "Try again in a moment.";
}

/** A parameter that is out of its range, mostly, or a prompt that is too long. */
function adviceFor(message) {
  if (/context|tokens|length|too long|fit/i.test(message)) {
    return "Begin a new conversation, delete from this one by editing an earlier message, or lower max tokens.";
  }
  return "Change what it names under Sampling, then try again.";
}

/** A parameter that it begins with stays as it is written. */
function sentence(text) {
  const trimmed = text.trim().replace(/\.$/, "");
  const first = /^[a-z]+(?=\s|,|$)/.test(trimmed) ? trimmed.charAt(0).toUpperCase() : trimmed.charAt(0);
  return `${first}${trimmed.slice(1)}.`;
}
