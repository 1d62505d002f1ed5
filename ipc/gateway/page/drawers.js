// On a narrow screen the lists beside the messages are drawers: one is open at a time, and then nothing else can be reached.

import { byId } from "./dom.js";

const NARROW = matchMedia("(max-width: 62rem)");
const DRAWERS = { "open-conversations": "conversations", "open-panel": "panel" };

let open = null;

/** The buttons open them; Escape, or a touch beside them, closes them. */
export function setUpDrawers() {
  for (const button of Object.keys(DRAWERS)) {
    byId(button).addEventListener("click", () => (open === button ? closeDrawer() : openDrawer(button)));
  }
  byId("scrim").addEventListener("click", closeDrawer);
  NARROW.addEventListener("change", closeDrawer);
  show();
}

/** Whether one was open. */
export function closeDrawer() {
  const button = open;
  open = null;
  show();
  if (button) byId(button).focus();
  return button !== null;
}

function openDrawer(button) {
  open = button;
  show();
  byId(DRAWERS[button]).querySelector("button, input, textarea")?.focus();
}

function show() {
  for (const [button, drawer] of Object.entries(DRAWERS)) {
    byId(button).setAttribute("aria-expanded", String(open === button));
    byId(drawer).classList.toggle("open", open === button);
    byId(drawer).inert = NARROW.matches && open !== button;
  }
  document.querySelector("main").inert = open !== null;
  byId("scrim").hidden = open === null;
}
