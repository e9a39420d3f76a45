"use strict";
// The list of conversations: search, rename, delete, export and import.

const shelf = new Shelf();
const WIDE = matchMedia("(min-width: 64rem)");

// Export format, as `/save` of g4ir chat: an OpenAI request body.
function exported({ messages, tools }) {
  return { messages: messages.map(plain), ...(tools.length ? { tools } : {}) };
}

const fileName = (title) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat"}.json`;

// Reads the conversations of a file: an exported one, a list of messages, or an export of all.
function imported(value) {
  const given = Array.isArray(value) ? [{ messages: value }] : value?.conversations ?? [value];
  if (!Array.isArray(given)) throw new Error("conversations: expected a list");
  return given.map((one, i) => {
    const at = given.length > 1 ? `conversations[${i}].` : "";
    const { messages, tools = [], title = "" } = asObject(one);
    const wrong = wrongMessages(messages) || (Array.isArray(tools) ? "" : "tools: expected a list")
      || (messages.length ? "" : "messages: is empty");
    if (wrong) throw new Error(at + wrong);
    const now = Date.now() + i;
    return { version: FORMAT, id: newId(), title: isText(title) ? title : "", created: now,
      updated: now, tools, messages: messages.map(plain) };
  });
}

async function importFiles(files) {
  let last = null;
  for (const file of [...files]) {
    try {
      for (const found of imported(JSON.parse(await file.text()))) {
        await shelf.put(found, 0);
        last = found.id;
      }
    } catch (error) {
      notice(`${file.name}: ${error.message}`);
    }
  }
  if (last) await openChat(last);
  drawChats();
}

async function exportAll() {
  const conversations = [];
  await shelf.conversations.each((_, one) => {
    conversations.push({ title: titleOf(one), ...exported(one) });
  });
  download("conversations.json", { conversations });
}

async function remove(id) {
  if (state.kept?.id === id) await begin();
  const one = await latest(id);
  if (!one) return;
  await shelf.remove(id);
  drawChats();
  find("search").focus();
  const back = async () => {
    await shelf.put(one, one.updated);
    drawChats();
  };
  notice(`Deleted: ${titleOf(one)}`, [["Undo", back]], UNDO_MS);
}

async function rename(id, title) {
  const one = await latest(id);
  if (one) await shelf.put({ ...one, title }, one.updated);
  drawChats();
}

// Edits the title in place: Enter and leaving the field accept, Escape cancels.
function typeTitle(id, row) {
  const field = made("input", { "aria-label": "Title", maxlength: "200" });
  field.value = shelf.list.get(id).title;
  let over = false;
  const end = async (taken) => {
    if (over) return;
    over = true;
    if (taken && field.value.trim()) await rename(id, field.value.trim());
    state.listed = "";
    drawChats();
    find("chat-list").querySelector("[aria-current]")?.focus();
  };
  field.addEventListener("blur", () => end(true));
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    end(event.key === "Enter");
  });
  row.replaceChildren(field);
  field.select();
}

// Returns a time as a text: today's as the clock time, else "Yesterday", the weekday within a week,
// or the date.
function dayOf(time, now = Date.now()) {
  const [then, midnight] = [new Date(time), new Date(now).setHours(0, 0, 0, 0)];
  const days = Math.round((midnight - new Date(time).setHours(0, 0, 0, 0)) / 86_400_000);
  if (days <= 0) return then.toLocaleTimeString(undefined, { hour: "numeric", minute: "2-digit" });
  if (days === 1) return "Yesterday";
  if (days < 7) return then.toLocaleDateString(undefined, { weekday: "long" });
  const year = then.getFullYear() === new Date(now).getFullYear() ? {} : { year: "numeric" };
  return then.toLocaleDateString(undefined, { day: "numeric", month: "short", ...year });
}

function chatRow({ id, title, updated }) {
  const current = state.kept?.id === id;
  const day = dayOf(updated);
  const row = made("li");
  const opens = button("", async () => {
    await openChat(id);
    find("scroll").focus();
  }, { class: "chat", title });
  opens.append(made("span", {}, title), made("small", {}, day));
  row.append(opens);
  if (current) {
    opens.setAttribute("aria-current", "true");
    row.append(made("div", { class: "acts" }, button("Rename", () => typeTitle(id, row)),
      button("Export", async () => {
        const one = await latest(id);
        download(fileName(title), exported(one));
      }), button("Delete", () => remove(id))));
  }
  return row;
}

// Renders the list if it has changed; otherwise elements keep their focus.
function drawChats() {
  const words = find("search").value.trim().toLowerCase();
  const found = [...shelf.list.values()].filter((one) => one.words.includes(words));
  found.sort((a, b) => b.updated - a.updated);
  const rows = found.map((one) => [one.id, one.title, dayOf(one.updated)]);
  const said = JSON.stringify([state.kept?.id, shelf.asides, words, rows]);
  if (said === state.listed) return;
  state.listed = said;
  find("chat-list").replaceChildren(...found.map(chatRow));
  find("no-chats").hidden = found.length > 0;
  find("no-chats").textContent = words ? "Nothing found" : "No conversations yet";
  find("export-all").hidden = shelf.list.size === 0;
  find("aside").hidden = shelf.asides === 0;
  find("aside-count").textContent = `${shelf.asides} could not be read`;
}

async function exportAside() {
  const all = [];
  await shelf.aside.each((_, value) => all.push(value));
  download("put-aside.json", all);
}

async function dropAside() {
  const [keys, values] = [[], []];
  await shelf.aside.each((key, value) => { keys.push(key); values.push(value); });
  for (const key of keys) await shelf.aside.delete(key);
  shelf.asides = 0;
  drawChats();
  const back = async () => {
    for (const value of values) await shelf.aside.add(value);
    shelf.asides = values.length;
    drawChats();
  };
  notice(`Deleted: ${values.length} that could not be read`, [["Undo", back]], UNDO_MS);
}

function showChats(shown) {
  find("chats").hidden = !shown;
  find("open-chats").setAttribute("aria-expanded", String(shown));
  if (WIDE.matches) lasting.setItem("chats", shown ? "" : "closed");
}

find("search").addEventListener("input", drawChats);
find("open-chats").addEventListener("click", () => {
  showChats(find("chats").hidden);
  if (!find("chats").hidden) find("search").focus();
});
find("chats").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || WIDE.matches) return;
  event.stopPropagation();
  showChats(false);
  find("open-chats").focus();
});
find("shade").addEventListener("click", () => showChats(false));
find("import").addEventListener("click", () => find("imported").click());
find("imported").addEventListener("change", async (event) => {
  await importFiles(event.target.files);
  event.target.value = "";
});
find("export-all").addEventListener("click", exportAll);
find("export-aside").addEventListener("click", exportAside);
find("drop-aside").addEventListener("click", dropAside);
