// How an answer is drawn: the controls under Sampling, and the body of a request that they make.

import { byId, element } from "./dom.js";

/** By vLLM's names. A control that is left empty is not sent: the model's own default holds, which is shown. */
const CONTROLS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, usual: 1, help: "0 takes the likeliest token each time" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, usual: 1, help: "Keep the likeliest tokens that make up this share" },
  { name: "top_k", label: "Top k", min: 0, step: 1, usual: "all", help: "Keep so many of the likeliest tokens" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, usual: 0, help: "Keep tokens at least so likely, next to the likeliest" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, usual: "no limit", help: "Of an answer; the context is a limit too" },
  { name: "seed", label: "Seed", min: 0, max: 2 ** 32 - 1, step: 1, usual: "drawn anew", help: "The same seed gives the same answer" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, usual: 0, help: "Against what was said at all" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, usual: 0, help: "Against what was said often" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 2, step: 0.05, usual: 1, help: "Against what prompt and answer have said" },
];
const WITH_SLIDER = new Set(["temperature", "top_p", "min_p"]);
const MOST_STOPS = 16;

/** The body of a request for the next message; an answer that failed, or has no words, was never said. */
export function requestBody({ settings, messages }, model) {
  const { system, stop, ...numbers } = settings;
  const said = messages.filter(({ role, content }) => role === "user" || content);
  const body = { model: model || undefined, messages: said.map(({ role, content }) => ({ role, content })), ...numbers };
  if (system) body.messages.unshift({ role: "system", content: system });
  const stops = (stop ?? "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops.slice(0, MOST_STOPS);
  return body;
}

/** What differs from the gateway's own, in a few words. */
export function summaryOf(settings) {
  const numbers = CONTROLS.filter(({ name }) => name in settings);
  const words = numbers.map(({ name, label }) => `${label.toLowerCase()} ${settings[name]}`);
  if (settings.system) words.unshift("system prompt");
  if (settings.stop) words.push("stop strings");
  return words.join(" · ");
}

/** The form of them. onChange(settings) is called with what was typed. */
export class SettingsForm {
  #settings = {};
  #defaults = {};

  constructor(onChange) {
    this.onChange = onChange;
    byId("controls").append(...CONTROLS.map((control) => this.#row(control)));
    for (const name of ["system", "stop"]) {
      byId(name).addEventListener("input", (event) => this.#set(name, event.target.value));
    }
    byId("reset").addEventListener("click", () => this.#reset());
  }

  /** Show these, and change these from now on. */
  show(settings) {
    this.#settings = settings;
    for (const control of CONTROLS) this.#fill(control);
    byId("system").value = settings.system ?? "";
    byId("stop").value = settings.stop ?? "";
    byId("reset").hidden = !summaryOf(settings);
  }

  /** The model's own values, of what is left empty. */
  showDefaults(defaults) {
    this.#defaults = defaults;
    for (const control of CONTROLS) {
      byId(control.name).placeholder = this.#usual(control);
      this.#fill(control);
    }
  }

  #usual({ name, usual }) {
    return this.#defaults[name] ?? usual;
  }

  #row(control) {
    const { name, label, min, max, step, usual, help } = control;
    const hint = `${name}-help`;
    const number = element("input", {
      id: name, type: "number", inputmode: "decimal", min, max, step: step === 1 ? 1 : "any",
      placeholder: usual, "aria-describedby": hint,
    });
    number.addEventListener("input", () => this.#typed(control, number));
    const row = element("div", { class: "control" }, element("label", { for: name }, label), number);
    if (WITH_SLIDER.has(name)) row.append(this.#slider(control));
    row.append(element("small", { id: hint }, help));
    return row;
  }

  #slider(control) {
    const { name, label, min, max, step } = control;
    const slider = element("input", { id: `${name}-slider`, type: "range", min, max, step, "aria-label": label });
    slider.addEventListener("input", () => this.#set(name, slider.valueAsNumber));
    return slider;
  }

  /** What is not a number yet, or out of range, is not taken; the field says so. */
  #typed({ name }, number) {
    const valid = number.validity.valid;
    number.setAttribute("aria-invalid", String(!valid));
    if (valid) this.#set(name, number.value === "" ? undefined : number.valueAsNumber, number);
  }

  #fill(control, typing) {
    const { name } = control;
    const value = this.#settings[name];
    const number = byId(name);
    if (number !== typing) {
      number.value = value ?? "";
      number.setAttribute("aria-invalid", "false");
    }
    if (WITH_SLIDER.has(name)) byId(`${name}-slider`).value = value ?? this.#usual(control);
    number.parentElement.classList.toggle("changed", value !== undefined);
  }

  #set(name, value, typing) {
    if (value === undefined || value === "") delete this.#settings[name];
    else this.#settings[name] = value;
    const control = CONTROLS.find((one) => one.name === name);
    if (control) this.#fill(control, typing);
    byId("reset").hidden = !summaryOf(this.#settings);
    this.onChange(this.#settings);
  }

  #reset() {
    for (const name of Object.keys(this.#settings)) delete this.#settings[name];
    this.show(this.#settings);
    this.onChange(this.#settings);
    byId("temperature").focus();
  }
}
