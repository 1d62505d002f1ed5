// The answers that are being written, one to a conversation, in as many conversations as you like.
//
// An answer is a message with: reasoning, finish (a reason, or "stopped" by whoever reads), problem ({what, advice}),
// and numbers: tokens, firstAfter (milliseconds, as seen here), perSecond (as the daemon says: pieces may come in one go).

import { chat } from "./gateway.js";
import { explain } from "./problems.js";
import { requestBody } from "./settings.js";

const SAVE_EVERY = 1000; // milliseconds

export class Answers {
  #running = new Map();

  /** onChange(conversation, answer, done) is called at each piece, and save(conversation) now and then. */
  constructor({ onChange, save }) {
    this.onChange = onChange;
    this.save = save;
  }

  isRunning(id) {
    return this.#running.has(id);
  }

  /** Hang up; what has come is kept. */
  stop(id) {
    this.#running.get(id)?.abort();
  }

  /** Ask the model for the next message of the conversation. */
  async start(conversation, model) {
    const hangUp = new AbortController();
    const answer = { role: "assistant", content: "", reasoning: "", model };
    const body = requestBody(conversation, model);
    conversation.messages.push(answer);
    this.#running.set(conversation.id, hangUp);
    this.#changed(conversation, answer, false);
    try {
      await this.#write(conversation, answer, chat(body, hangUp.signal));
    } catch (error) {
      if (hangUp.signal.aborted) answer.finish = "stopped";
      else answer.problem = explain(error);
    }
    if (this.#running.get(conversation.id) === hangUp) this.#running.delete(conversation.id);
    this.save(conversation);
    this.#changed(conversation, answer, true);
  }

  async #write(conversation, answer, news) {
    const clock = new Clock();
    let saved = clock.began;
    for await (const piece of news) {
      answer.content += piece.text ?? "";
      answer.reasoning += piece.reasoning ?? "";
      answer.finish = piece.finish ?? answer.finish;
      if (piece.text || piece.reasoning) clock.piece();
      Object.assign(answer, clock.numbers(piece.usage?.completion_tokens, piece.timings?.predicted_per_second));
      if (clock.last - saved > SAVE_EVERY) {
        this.save(conversation);
        saved = clock.last;
      }
      this.#changed(conversation, answer, false);
    }
  }

  #changed(conversation, answer, done) {
    this.onChange(conversation, answer, done);
  }
}

/** When the pieces of an answer came. */
class Clock {
  began = performance.now();
  first = null;
  last = this.began;

  piece() {
    this.last = performance.now();
    this.first ??= this.last;
  }

  /** Once the tokens are known, which is at the end. */
  numbers(tokens, perSecond) {
    if (this.first === null) return {};
    const firstAfter = this.first - this.began;
    return tokens ? { firstAfter, tokens, perSecond } : { firstAfter };
  }
}
