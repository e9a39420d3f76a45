"use strict";
// Shared helpers: DOM elements, notices, files, local storage.

const find = (id) => document.getElementById(id);
const [log, text, send, stop, status] = ["log", "text", "send", "stop", "status"].map(find);
const NEAR_END = 80;
const SAID_MS = 1500;
const UNDO_MS = 10000;

// If the browser forbids storage, values last as long as the page.
function storage(name) {
  try {
    return window[name];
  } catch {
    const held = new Map();
    return { getItem: (id) => held.get(id) ?? null, setItem: (id, value) => held.set(id, value) };
  }
}

const [lasting, session] = [storage("localStorage"), storage("sessionStorage")];

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function button(label, act, attributes = {}) {
  return made("button", { type: "button", onclick: act, ...attributes }, label);
}

// Runs `change`, then scrolls to the end if it was visible before, or if `always`.
function scrolled(change, always = false) {
  const box = find("scroll");
  const follows = always || box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  const result = change();
  if (follows) box.scrollTop = box.scrollHeight;
  return result;
}

// `again`: function of a "try again" button.
function showError(message, again = null) {
  const body = made("div", { class: "body", role: "alert" }, message);
  const retry = () => { body.parentElement.remove(); again(); };
  if (again) body.append(" ", button("Try again", retry, { class: "act" }));
  scrolled(() => log.append(made("li", { class: "error" }, body)), true);
}

// Shows a notice until it is closed, or for `ms` milliseconds if that is not 0; `acts`: buttons as
// [label, function].
function notice(message, acts = [], ms = 0) {
  const shown = made("li", {}, made("span", {}, message));
  for (const [label, act] of acts) shown.append(button(label, () => { shown.remove(); act(); }));
  shown.append(button("×", () => shown.remove(), { "aria-label": "Close" }));
  find("notices").append(shown);
  if (ms) setTimeout(() => shown.remove(), ms);
}

// Copies a text, and shows the result on the button. Without TLS a remote page has no clipboard API: a
// selection is copied instead.
async function copy(source, given) {
  let done = true;
  try {
    await navigator.clipboard.writeText(source);
  } catch {
    const field = made("textarea", { class: "unseen" });
    field.value = source;
    document.body.append(field);
    field.select();
    done = document.execCommand("copy");
    field.remove();
    given.focus();
  }
  given.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => { given.textContent = "Copy"; }, SAID_MS);
}

function download(name, value) {
  const content = new Blob([`${JSON.stringify(value, null, 1)}\n`], { type: "application/json" });
  const href = URL.createObjectURL(content);
  made("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), UNDO_MS);
}
