// The list of conversations: choose, rename in place, delete and undo.

import { titleOf } from "./conversations.js";
import { byId, element, iconButton } from "./dom.js";

export class Sidebar {
  #list = byId("list");

  /** on has open(conversation), rename(conversation, title), remove(conversation). */
  constructor(on) {
    this.on = on;
  }

  /** isRunning(id) says where an answer is being written. */
  show(conversations, current, isRunning) {
    const focused = document.activeElement?.closest?.("#list li")?.dataset.id;
    this.#list.replaceChildren(...conversations.map((one) => this.#row(one, one.id === current.id, isRunning(one.id))));
    if (focused) this.#list.querySelector(`li[data-id="${focused}"] .open`)?.focus();
  }

  #row(conversation, isCurrent, isRunning) {
    const title = titleOf(conversation);
    const open = element("button", { type: "button", class: "open", "aria-current": isCurrent && "true" }, title);
    open.addEventListener("click", () => this.on.open(conversation));
    const row = element("li", { "data-id": conversation.id, class: isRunning && "running" }, open);
    if (isRunning) open.append(element("span", { class: "unseen" }, ", answering"));
    row.append(
      iconButton("edit", `Rename “${title}”`, () => this.#rename(row, conversation)),
      iconButton("delete", `Delete “${title}”`, () => this.on.remove(conversation)),
    );
    return row;
  }

  /** Enter, or leaving the field, takes the new name; Escape leaves the old one. */
  #rename(row, conversation) {
    const before = titleOf(conversation);
    const field = element("input", { type: "text", "aria-label": "New name", maxlength: 80 });
    field.value = before;
    const end = (title) => {
      field.removeEventListener("blur", leave);
      this.on.rename(conversation, title.trim() || before);
      this.#list.querySelector(`li[data-id="${conversation.id}"] .open`)?.focus();
    };
    const leave = () => end(field.value);
    field.addEventListener("blur", leave);
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(field.value);
      if (event.key === "Escape") end(before);
      if (event.key === "Escape") event.stopPropagation(); // it stops no answer
    });
    row.replaceChildren(field);
    field.select();
  }
}
