// The page: what is shown, and what happens when.

import { Announcer } from "./announcer.js";
import { Answers } from "./answers.js";
import { Composer } from "./composer.js";
import { Conversations, titleOf } from "./conversations.js";
import { byId, element } from "./dom.js";
import { closeDrawer, setUpDrawers } from "./drawers.js";
import { EngineView } from "./engine.js";
import { apiKey, models, setApiKey } from "./gateway.js";
import { explain } from "./problems.js";
import { SettingsForm, summaryOf } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Transcript } from "./transcript.js";

const OPEN = "odriver.open";

const conversations = new Conversations(localStorage);
const announcer = new Announcer();
const answers = new Answers({ onChange: showAnswer, save });
const transcript = new Transcript({ suggest: send, edit, again, giveKey });
const sidebar = new Sidebar({ open, rename, remove });
const composer = new Composer({ send, stop });
const settings = new SettingsForm(changeSettings);
const engine = new EngineView(modelName, () => modelName() || findModels());
/** Those with an answer being written are these objects, and not what the storage has of them. */
const live = new Map();
const removed = new Set();
/** By name, the models as the gateway describes them. */
let served = new Map();
let current;

function start() {
  setUpDrawers();
  const kept = conversations.all();
  open(kept.find(({ id }) => id === sessionStorage.getItem(OPEN)) ?? conversations.create(kept[0]?.settings ?? {}));
  byId("new").addEventListener("click", begin);
  byId("key").addEventListener("click", () => giveKey());
  byId("model").addEventListener("change", () => {
    showModel();
    composer.focus();
  });
  setUpKeyDialog();
  document.addEventListener("keydown", shortcut);
  addEventListener("pagehide", () => live.forEach(save));
  addEventListener("storage", showList);
  findModels();
  engine.watch();
  composer.focus();
}

// Conversations

function open(conversation) {
  current = live.get(conversation.id) ?? conversation;
  sessionStorage.setItem(OPEN, current.id);
  settings.show(current.settings);
  showSampled();
  transcript.show(current, answers.isRunning(current.id) ? current.messages.at(-1) : null);
  document.title = current.messages.length ? `${titleOf(current)} · oDriver` : "oDriver";
  showList();
  closeDrawer();
  composer.show(answers.isRunning(current.id));
}

function begin() {
  open(conversations.create({ ...current.settings }));
  composer.focus();
}

function rename(conversation, title) {
  const renamed = live.get(conversation.id) ?? (conversation.id === current.id ? current : conversation);
  renamed.title = title;
  keep(() => conversations.restore(renamed));
  showList();
}

function remove(conversation) {
  answers.stop(conversation.id);
  live.delete(conversation.id);
  removed.add(conversation.id);
  conversations.remove(conversation.id);
  if (conversation.id === current.id) begin();
  showList();
  const undo = element("button", { type: "button", class: "quiet" }, "Undo");
  undo.addEventListener("click", () => {
    removed.delete(conversation.id);
    keep(() => conversations.restore(conversation));
    notice();
    open(conversation);
  });
  notice(`“${titleOf(conversation)}” is deleted.`, undo);
}

function showList() {
  sidebar.show(conversations.all(), current, (id) => answers.isRunning(id));
}

function save(conversation) {
  if (!removed.has(conversation.id)) keep(() => conversations.save(conversation));
}

/** Where the browser keeps no more, the conversation goes on, and is told. */
function keep(write) {
  try {
    write();
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    notice("This browser keeps no more conversations: delete some. What is new is lost when the page is closed.");
  }
}

// Talking

function send(text) {
  notice();
  current.messages.push({ role: "user", content: text });
  ask();
}

function ask() {
  const conversation = current;
  live.set(conversation.id, conversation);
  announcer.begin();
  const written = answers.start(conversation, modelName());
  save(conversation);
  open(conversation);
  written.then(() => answers.isRunning(conversation.id) || live.delete(conversation.id));
}

function stop() {
  answers.stop(current.id);
}

/** A piece has come, or the end. */
function showAnswer(conversation, answer, done) {
  if (conversation.id === current.id && current.messages.includes(answer)) {
    transcript.update(answer, !done);
    announcer.tell(answer.content, done);
  }
  if (!done) return;
  showList();
  composer.show(answers.isRunning(current.id));
}

/** Whatever came after the message is forgotten. */
function edit(message) {
  cutBefore(message);
  composer.show(false);
  composer.write(message.content);
}

function again(answer) {
  cutBefore(answer);
  ask();
  composer.focus(); // the button that was pressed is gone
}

function cutBefore(message) {
  const conversation = current;
  const before = [...current.messages];
  answers.stop(current.id);
  current.messages.splice(current.messages.indexOf(message));
  save(current);
  open(current);
  const undo = element("button", { type: "button", class: "quiet" }, "Undo");
  undo.addEventListener("click", () => {
    answers.stop(conversation.id);
    conversation.messages.splice(0, Infinity, ...before);
    save(conversation);
    open(conversation);
    notice();
  });
  if (before.at(-1) !== message) notice("What came after is gone.", undo);
}

// Settings

function changeSettings() {
  showSampled();
  if (current.messages.length) save(current);
}

function showSampled() {
  byId("sampled").textContent = summaryOf(current.settings);
}

function modelName() {
  return byId("model").value;
}

/** Asked for again, should a daemon be there at last. */
async function findModels() {
  try {
    showModels(await models());
  } catch (error) {
    const { what, advice, wantsKey } = explain(error);
    const button = element("button", { type: "button", class: "quiet" }, wantsKey ? "Give it a key" : "Try again");
    button.addEventListener("click", () => (wantsKey ? giveKey() : findModels()));
    notice(`${what} ${advice}`, button);
  }
}

function showModels(found) {
  const select = byId("model");
  const before = select.value;
  served = new Map(found.map((model) => [model.id, model]));
  select.replaceChildren(...found.map(({ id }) => element("option", {}, id)));
  if (served.has(before)) select.value = before;
  select.disabled = found.length < 2;
  showModel();
  notice();
}

function showModel() {
  byId("prompt").placeholder = `Message ${modelName()}`;
  const model = served.get(modelName());
  settings.showDefaults(model?.default_sampling_params ?? {});
  byId("context").textContent = model ? `${model.max_model_len.toLocaleString()} tokens` : "–";
}

function giveKey() {
  byId("key-field").value = apiKey();
  byId("key-dialog").showModal();
}

function setUpKeyDialog() {
  const dialog = byId("key-dialog");
  byId("key-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("submit", () => {
    setApiKey(byId("key-field").value.trim());
    findModels();
    composer.focus();
  });
}

// The page itself

/** A word above the message box; nothing takes the last one away. */
function notice(...words) {
  byId("notice").replaceChildren(...words);
}

function shortcut(event) {
  if (event.key === "Escape" && !byId("key-dialog").open && !closeDrawer()) stop();
  if (event.key === "O" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    begin();
  }
}

start();
