// The conversations, in the browser's localStorage: one entry each, so that several tabs may write theirs.
//
// A conversation is {id, title, updated, settings, messages}; a message is {role, content} and, of an answer, what
// answers.js adds to it.

const PREFIX = "odriver.conversation.";
const MAX_TITLE = 48;

export class Conversations {
  #storage;

  constructor(storage) {
    this.#storage = storage;
  }

  /** The latest first. */
  all() {
    const keys = Object.keys(this.#storage).filter((key) => key.startsWith(PREFIX));
    const found = keys.map((key) => this.#read(key)).filter((one) => one !== null);
    return found.sort((one, other) => other.updated - one.updated);
  }

  /** A new one, which is not kept before it is saved. */
  create(settings) {
    return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", updated: 0, settings, messages: [] };
  }

  /** Raises QuotaExceededError where the browser keeps no more. */
  save(conversation) {
    conversation.updated = Date.now();
    this.restore(conversation);
  }

  /** As it was, its time too. */
  restore(conversation) {
    this.#storage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
  }

  remove(id) {
    this.#storage.removeItem(PREFIX + id);
  }

  #read(key) {
    try {
      const read = JSON.parse(this.#storage.getItem(key));
      const whole = typeof read.id === "string" && Array.isArray(read.messages) && read.settings instanceof Object;
      return whole ? read : null;
    } catch (error) {
      console.warn(`${key} is not a conversation`, error);
      return null;
    }
  }
}

/** What it is called in the list: its own title, or how it begins. */
export function titleOf({ title, messages }) {
  if (title) return title;
  const first = messages.find((message) => message.role === "user");
  if (!first) return "New conversation";
  const words = first.content.trim().replace(/\s+/g, " ");
  return words.length > MAX_TITLE ? `${words.slice(0, MAX_TITLE - 1)}…` : words;
}
