// Where messages are written: Enter sends, Shift and Enter is a new line, Escape stops.

import { byId } from "./dom.js";

/** Its keyboard has no Shift and Enter, and a button is near. */
const TOUCH = matchMedia("(pointer: coarse)");

export class Composer {
  #field = byId("prompt");
  #running = false;

  /** on has send(text) and stop(). */
  constructor(on) {
    this.on = on;
    this.#field.addEventListener("input", () => this.#fit());
    this.#field.addEventListener("keydown", (event) => this.#key(event));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("stop-answer").addEventListener("click", () => on.stop());
  }

  /** While an answer is written there is nothing to send, but one may write already. */
  show(running) {
    const hadFocus = document.activeElement === byId("stop-answer");
    this.#running = running;
    byId("stop-answer").hidden = !running;
    byId("send").hidden = running;
    if (hadFocus && !running) this.focus();
    this.#fit();
  }

  /** Put a text there to be changed. */
  write(text) {
    this.#field.value = text;
    this.#fit();
    this.#field.focus();
  }

  /** Ready to be written in, but for a keyboard that would come up over what is to be read. */
  focus() {
    if (!TOUCH.matches) this.#field.focus();
  }

  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || TOUCH.matches) return;
    event.preventDefault();
    this.#send();
  }

  #send() {
    const text = this.#field.value.trim();
    if (!text || this.#running) return;
    this.#field.value = "";
    this.#fit();
    this.on.send(text);
  }

  #fit() {
    this.#field.style.height = "auto";
    this.#field.style.height = `${this.#field.scrollHeight}px`;
    byId("send").disabled = !this.#field.value.trim();
  }
}
