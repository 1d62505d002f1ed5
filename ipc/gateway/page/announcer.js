// The answer for screen readers: whole sentences as they are complete, not every token.

import { byId, element } from "./dom.js";

const SENTENCES = /^[^]*[.!?:…](?=["”')*_`]*\s)["”')*_`]*|^[^]*\n\n/;
/** Characters before something is said, so that short sentences come together. */
const ENOUGH = 120;

export class Announcer {
  #place = byId("announcer");
  #said = 0;

  /** Of an answer that begins. */
  begin() {
    this.#said = 0;
    this.#place.replaceChildren();
    this.#say("Answering.");
  }

  /** The text so far, and whether it is all. */
  tell(text, done) {
    const rest = text.slice(this.#said);
    const whole = done ? rest : rest.length < ENOUGH ? "" : (SENTENCES.exec(rest)?.[0] ?? "");
    if (whole.trim()) this.#say(whole);
    this.#said += whole.length;
  }

  #say(text) {
    this.#place.append(element("p", {}, text.replace(/[*_`#|]+/g, "")));
  }
}
