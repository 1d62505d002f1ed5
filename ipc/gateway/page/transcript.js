// The messages of the conversation that is shown.

import { byId, element, iconButton } from "./dom.js";
import { BROKEN_OFF } from "./problems.js";
import { copyText, Rendering } from "./rendering.js";

const NEAR = 60; // pixels from the end that count as being there
const FINISHES = {
  stopped: "stopped by you",
  length: "cut off by max tokens, or the end of the context",
  abort: "aborted in the daemon",
  timeout: "out of time",
  repetition: "ended for going round in circles",
};
const SUGGESTIONS = ["Tell me a story.", "What is 7 + 8?", "Who are you?"];

export class Transcript {
  #messages = byId("messages");
  #scroller = byId("transcript");
  #views = new Map();
  #frame = 0;

  /** on has what the buttons do: suggest(text), edit(message), again(message), giveKey(). */
  constructor(on) {
    this.on = on;
    this.#scroller.addEventListener("scroll", () => this.#showLatest());
    byId("latest").addEventListener("click", () => this.toEnd());
  }

  /** All of a conversation; running is the answer that is being written, if any. */
  show(conversation, running) {
    this.#views.clear();
    const { messages } = conversation;
    const views = messages.map((message) => this.#add(message, message === running));
    this.#messages.replaceChildren(...(views.length ? views : [this.#welcome()]));
    this.toEnd();
  }

  /** A message that has grown, on the next frame: more than one piece may come between two. */
  update(message, running) {
    this.pending = { message, running };
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  toEnd() {
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#showLatest();
  }

  #draw() {
    this.#frame = 0;
    const { message, running } = this.pending;
    const view = this.#views.get(message);
    if (!view) return; // another conversation is shown by now
    const follows = this.#isAtEnd();
    view.show(message, running);
    if (follows) this.toEnd();
    this.#showLatest();
  }

  #isAtEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.#scroller;
    return scrollTop + clientHeight >= scrollHeight - NEAR;
  }

  #showLatest() {
    byId("latest").hidden = this.#isAtEnd();
  }

  #add(message, running) {
    const view = message.role === "user" ? new UserMessage(this.on) : new AnswerMessage(this.on);
    this.#views.set(message, view);
    view.show(message, running);
    return view.node;
  }

  #welcome() {
    const buttons = SUGGESTIONS.map((text) => {
      const button = element("button", { type: "button", class: "suggestion" }, text);
      button.addEventListener("click", () => this.on.suggest(text));
      return button;
    });
    const words = element("p", {}, "What you write goes to the model, and nowhere else.");
    return element("div", { class: "welcome" }, element("h2", {}, "What shall we talk about?"), words, element("div", {}, ...buttons));
  }
}

/** What the user said, as it was typed. */
class UserMessage {
  constructor(on) {
    this.text = element("p", { class: "said" });
    const actions = element("div", { class: "actions" });
    actions.append(iconButton("edit", "Edit and ask anew", () => on.edit(this.message)));
    actions.append(copyButton(() => this.message.content));
    this.node = element("article", { class: "user" }, heading("You"), this.text, actions);
  }

  show(message) {
    this.message = message;
    this.text.textContent = message.content;
  }
}

/** What the model said: its thoughts, its words, and how it went. */
class AnswerMessage {
  constructor(on) {
    this.on = on;
    this.thoughts = element("div", { class: "prose" });
    this.thinking = element("details", { class: "thinking", hidden: true }, element("summary", {}, "Thoughts"), this.thoughts);
    this.words = element("div", { class: "prose" });
    this.problem = element("div", { class: "problem", role: "alert", hidden: true });
    this.numbers = element("span", { class: "numbers" });
    this.actions = element("div", { class: "actions" });
    this.actions.append(copyButton(() => this.message.content));
    this.actions.append(iconButton("again", "Answer again", () => on.again(this.message)));
    this.actions.append(this.numbers);
    this.rendering = new Rendering(this.words);
    this.reasoning = new Rendering(this.thoughts);
    this.name = heading("Answer");
    this.node = element("article", { class: "answer" }, this.name, this.thinking, this.words, this.problem, this.actions);
  }

  show(message, running) {
    this.message = message;
    this.name.textContent = message.model || "Answer";
    this.node.setAttribute("aria-busy", String(running));
    this.node.classList.toggle("running", running);
    this.node.classList.toggle("silent", running && !message.content && !message.reasoning);
    this.rendering.show(message.content);
    this.#think(message, running);
    this.#complain(message.problem ?? (running || message.finish ? null : BROKEN_OFF));
    this.actions.hidden = running || !message.content;
    this.numbers.textContent = numbersOf(message);
  }

  /** Open while there is nothing else to read; whoever closes it is not contradicted. */
  #think({ reasoning, content }, running) {
    this.thinking.hidden = !reasoning;
    if (!reasoning) return;
    if (running && !content && this.wasThinking !== true) this.thinking.open = this.wasThinking = true;
    if (content && this.wasThinking) this.thinking.open = this.wasThinking = false;
    this.reasoning.show(reasoning);
  }

  #complain(problem) {
    this.problem.hidden = !problem;
    if (!problem || this.problem.childNodes.length) return;
    const { what, advice, wantsKey } = problem;
    this.problem.append(element("p", {}, element("strong", {}, what), " ", advice));
    if (wantsKey) this.problem.append(textButton("Give it a key", () => this.on.giveKey()));
    this.problem.append(textButton("Try again", () => this.on.again(this.message)));
  }
}

/** For who goes from heading to heading. */
function heading(text) {
  return element("h2", { class: "unseen" }, text);
}

function textButton(text, onClick) {
  const button = element("button", { type: "button", class: "primary" }, text);
  button.addEventListener("click", onClick);
  return button;
}

function copyButton(text) {
  const button = element("button", { type: "button", class: "quiet" }, "Copy");
  button.addEventListener("click", () => copyText(button, text()));
  return button;
}

function numbersOf({ tokens, firstAfter, perSecond, finish }) {
  const words = [];
  if (tokens) words.push(`${tokens.toLocaleString("en")} tokens`);
  if (perSecond) words.push(`${Math.round(perSecond).toLocaleString("en")} tokens/s`);
  if (firstAfter) words.push(`first after ${firstAfter < 1000 ? `${firstAfter.toFixed(0)} ms` : `${(firstAfter / 1000).toFixed(1)} s`}`);
  if (FINISHES[finish]) words.push(FINISHES[finish]);
  return words.join(" · ");
}
