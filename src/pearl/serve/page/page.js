// The page of `pearl serve`. Photos are kept in `pictures` alone; nothing is stored in the browser.
import { discover, dropGroups, isUnknown, setUpDiscovery } from "./discover.js";
import { allowChanges, setUpHistory, showHistory } from "./history.js";
import { at, checkSize, make, option, plural, request, save } from "./server.js";

const UNSURE = 0.7; // a best class below this probability is unsure
const AT_ONCE = 6; // photos that are predicted together
const percent = (share) => `${(share === 1 ? 100 : Math.min(100 * share, 99.9)).toFixed(1)}\u00a0%`;

let model = { classes: [], tasks: [], limits: {} };
let pictures = []; // {file, name, url, item, found, error, label}
let learning = null; // the job that is watched: {id, taught}
let changing = false; // something is being taken back
let waiting = [];
let running = 0;
let leftOut = 0; // files that are no photos

// ------------------------------------------------------------------------------------------------------ the model

async function loadModel() {
  model = await request("/v1/model");
  document.title = `${model.name} – pearl`;
  at("model").textContent = model.name;
  at("about").textContent = `${plural(model.classes.length, "class")} in ${plural(model.tasks.length, "task")}, ${model.method} on ${model.backbone}`;
  at("classes").replaceChildren(...model.classes.map((name) => option(name, "")));
  at("fast-choice").hidden = !model.finds_unknown;
  at("unknown").hidden = !model.finds_unknown;
  showHistory(model);
  if (model.job && !learning) watch(model.job, []);
}

// Photos are named again, by the model as it is now.
async function nameAgain() {
  await loadModel();
  waiting = pictures.filter(({ error }) => !error);
  work();
  show();
}

async function renew() {
  await nameAgain();
  dropGroups();
}

// ------------------------------------------------------------------------------------------------- photos come in

const readable = (file) => file.type.startsWith("image/") || /\.(heic|heif|tiff?|bmp|webp|avif|jp2)$/i.test(file.name);

function add(files) {
  const photos = [...files].filter(readable);
  const others = files.length - photos.length;
  for (const file of photos) {
    const picture = { file, name: file.webkitRelativePath || file.path || file.name, url: URL.createObjectURL(file) };
    picture.item = card(picture);
    pictures.push(picture);
    waiting.push(picture);
  }
  at("pictures").append(...pictures.slice(pictures.length - photos.length).map((picture) => picture.item));
  leftOut += others;
  work();
  show();
}

async function filesBelow(entry, path = "") {
  if (entry.isFile) {
    const file = await new Promise((done, fail) => entry.file(done, fail));
    file.path = path + file.name;
    return [file];
  }
  const reader = entry.createReader();
  const found = [];
  for (;;) { // it gives some at a time
    const some = await new Promise((done, fail) => reader.readEntries(done, fail));
    if (!some.length) break;
    found.push(...some);
  }
  found.sort((a, b) => a.name.localeCompare(b.name));
  return (await Promise.all(found.map((each) => filesBelow(each, `${path}${entry.name}/`)))).flat();
}

function work() {
  while (running < AT_ONCE && waiting.length) {
    running += 1;
    predict(waiting.shift()).finally(() => { running -= 1; work(); show(); });
  }
}

async function predict(picture) {
  const turn = picture.turn = (picture.turn ?? 0) + 1;
  try {
    const headers = { "Content-Type": picture.file.type.startsWith("image/") ? picture.file.type : "application/octet-stream" };
    const found = await request("/v1/predict?top_k=3", { method: "POST", body: picture.file, headers });
    if (turn !== picture.turn) return; // it is named again by now
    [picture.found, picture.error] = [found, null];
  } catch (error) {
    picture.error = error.message;
  }
  fill(picture);
}

// --------------------------------------------------------------------------------------------------- photos shown

function card(picture) {
  const item = at("picture").content.firstElementChild.cloneNode(true);
  const [image, form] = [item.querySelector("img"), item.querySelector("form")];
  image.src = picture.url;
  image.alt = picture.name;
  item.querySelector(".file").textContent = picture.name;
  item.querySelector(".verdict").textContent = "…";
  form.querySelector("input").setAttribute("aria-label", `Another class for ${picture.name}`);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    label([picture], form.querySelector("input").value);
  });
  item.querySelector(".chosen button").addEventListener("click", () => {
    label([picture], null);
    form.querySelector("input").focus();
  });
  return item;
}

function fill(picture) {
  const [verdict, candidates] = [picture.item.querySelector(".verdict"), picture.item.querySelector(".candidates")];
  picture.item.classList.toggle("failed", !!picture.error);
  if (picture.error) {
    verdict.textContent = picture.error;
    verdict.className = "verdict error";
    candidates.replaceChildren();
    return;
  }
  const best = picture.found[0];
  verdict.textContent = best.unknown ? "unknown" : `${best.label}, ${percent(best.score)}`;
  verdict.className = best.unknown ? "verdict unknown" : best.score < UNSURE ? "verdict unsure" : "verdict";
  candidates.setAttribute("aria-label", `Right class of ${picture.name}`);
  candidates.replaceChildren(...picture.found.map(({ label: name, score }) => {
    const button = Object.assign(make("button"), { type: "button" });
    button.append(make("span", name), make("span", percent(score)));
    button.addEventListener("click", () => label([picture], name));
    return button;
  }));
}

const FILTERS = {
  "": ["all photos", () => true],
  "?unsure": [`unsure (below ${100 * UNSURE} %)`, ({ found, error }) => !error && found && found[0].score < UNSURE],
  "?unknown": ["unknown", ({ found, error }) => !error && found?.[0].unknown],
  "?tray": ["in the tray", ({ label: name }) => !!name],
  "?error": ["not readable", ({ error }) => !!error],
};
const chosen = (value) => FILTERS[value]?.[1] ?? (({ found, error }) => !error && found && `=${found[0].label}` === value && !found[0].unknown);
const shown = () => pictures.filter(chosen(at("filter").value));

let drawing = false;
function show() { // once per frame, however many photos change
  if (!drawing) requestAnimationFrame(() => { drawing = false; draw(); });
  drawing = true;
}

function draw() {
  const select = at("filter");
  const names = new Set(pictures.filter(({ found, error }) => found && !error && !found[0].unknown).map(({ found }) => found[0].label));
  const values = [...Object.keys(FILTERS), ...[...names].sort().map((name) => `=${name}`)];
  const now = values.includes(select.value) ? select.value : "";
  select.replaceChildren(...values.map((value) => {
    const count = pictures.filter(chosen(value)).length;
    return option(value, `${FILTERS[value]?.[0] ?? value.slice(1)} (${count})`);
  }));
  select.value = now;
  const visible = new Set(shown());
  for (const picture of pictures) picture.item.hidden = !visible.has(picture);
  at("tools").hidden = !pictures.length;
  at("all-count").textContent = `All ${plural(visible.size, "photo")} shown are`;
  const open = waiting.length + running;
  const skipped = leftOut ? `; ${plural(leftOut, "file")} left out, as no photo` : "";
  const unknown = pictures.filter(isUnknown).length;
  at("discover").textContent = unknown ? `Group ${plural(unknown, "unknown photo")}` : "Group unknown photos";
  at("discover").disabled = unknown < 2 || open > 0;
  at("progress").textContent = open ? `${pictures.length - open} of ${plural(pictures.length, "photo")}${skipped}` : pictures.length || leftOut ? `${plural(pictures.length, "photo")}${skipped}` : "";
  drawTray();
}

function csv() {
  const cell = (value) => `"${(/^\s*[=+\-@]/.test(value) ? `'${value}` : `${value}`).replaceAll('"', '""')}"`;
  const head = ["file", "class", "probability", "second", "second_probability", "third", "third_probability", "unknown", "in_distribution", "corrected", "error"];
  const rows = shown().map(({ name, found, error, label: chosenName }) => {
    const ranks = [0, 1, 2].flatMap((i) => (found?.[i] ? [found[i].label, found[i].score.toFixed(6)] : ["", ""]));
    const best = found?.[0];
    return [name, ...ranks, best?.unknown ?? "", best?.in_distribution?.toFixed(4) ?? "", chosenName ?? "", error ?? ""];
  });
  const text = [head, ...rows].map((row) => row.map(cell).join(",")).join("\r\n");
  save(new Blob([`${text}\r\n`], { type: "text/csv" }), `${model.name}.csv`);
}

// ------------------------------------------------------------------------------------------------ the tray, teaching

function label(some, name) {
  name = name?.normalize("NFC").trim() || null;
  for (const picture of some) {
    if (picture.error) continue;
    picture.label = name;
    const line = picture.item.querySelector(".chosen");
    line.hidden = !name;
    line.firstElementChild.textContent = `In the tray as ${name}`;
    for (const part of picture.item.querySelectorAll(".candidates, form")) part.hidden = !!name;
    picture.item.querySelector("input").value = "";
  }
  show();
}

function drawTray() {
  const classes = new Map();
  for (const picture of pictures.filter(({ label: name }) => name)) {
    classes.set(picture.label, [...(classes.get(picture.label) ?? []), picture]);
  }
  at("tray").replaceChildren(...[...classes].map(([name, some]) => {
    const item = make("li");
    const kind = model.classes.includes(name) ? "more of a known class" : "new class";
    const remove = Object.assign(make("button", "Remove"), { type: "button" });
    remove.setAttribute("aria-label", `Remove ${name} from the tray`);
    remove.addEventListener("click", () => label(some, null));
    item.append(make("span", `${plural(some.length, "photo")} of ${name}: ${kind}`), remove);
    return item;
  }));
  at("empty").hidden = classes.size > 0;
  at("start").disabled = !classes.size || !!learning || changing;
  allowChanges(model, !!learning || changing);
  const count = [...classes.values()].flat().length;
  at("start").textContent = count ? `Teach ${plural(count, "photo")}` : "Teach";
  at("to-teach").textContent = count ? `Teach (${count})` : "Teach";
}

async function teach() {
  const taught = pictures.filter(({ label: name }) => name);
  const form = new FormData();
  for (const { file, label: name } of taught) {
    form.append("images", file);
    form.append("labels", name);
  }
  form.append("fast", at("fast").checked && !at("fast-choice").hidden);
  form.append("allow_new_style", true); // the user has looked at each photo
  at("start").disabled = true;
  try {
    checkSize(taught, model.limits, "taught");
    const { id } = await request("/v1/learn", { method: "POST", body: form });
    watch(id, taught);
  } catch (error) {
    finish("Not taught", [error.message], true);
  }
}

function watch(id, taught) {
  learning = { id, taught };
  at("job").hidden = false;
  at("result").hidden = true;
  at("bar").removeAttribute("value");
  at("cancel").disabled = false;
  at("state").textContent = "Starting …";
  at("detail").textContent = "";
  const source = new EventSource(`/v1/jobs/${id}/events`);
  source.onmessage = ({ data }) => {
    const job = JSON.parse(data);
    progress(job);
    if (job.first_answer && job.state === "learning" && !learning.answered) {
      learning.answered = true; // by a model that knows the new classes
      nameAgain().catch(() => {});
    }
    if (["done", "failed", "cancelled"].includes(job.state)) {
      source.close();
      ended(job, taught);
    }
  };
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) ended({ state: "failed", error: "the server was restarted; teach the same photos again to go on" }, taught);
    else at("state").textContent = "The server does not answer; trying again …";
  };
  show();
}

function progress(job) {
  const words = { starting: "Starting …", loading: "Loading the grown model …", learning: job.phase === "decode" ? "Reading photos" : `Training: ${job.phase}` };
  if (words[job.state] && at("state").textContent !== words[job.state]) at("state").textContent = words[job.state];
  const bar = at("bar");
  if (job.state === "learning" && job.total) Object.assign(bar, { max: job.total, value: job.done });
  else bar.removeAttribute("value");
  const time = job.seconds_left === null ? "" : `, about ${Math.ceil(job.seconds_left)} s left in this phase`;
  const already = job.first_answer ? "; until then photos are named by a first answer, with these classes" : "";
  at("detail").textContent = job.state === "learning" ? `${job.done} of ${job.total}${time}${already}` : "";
}

async function ended(job, taught) {
  const answered = learning?.answered;
  learning = null;
  if (job.state === "done") label(taught, null);
  if (job.state === "done" || answered) await renew().catch(() => {}); // a first answer is gone
  if (job.state === "done") {
    finish(`Learnt: ${job.task}`, [...outcome(job.outcome), ...job.notes], false);
  } else if (job.state === "cancelled") {
    finish("Cancelled", ["The model is as it was. Teach the same photos again to go on from here."], true);
  } else {
    finish("Not learnt", [job.error, ...(job.notes ?? [])], true);
  }
}

function outcome(found) {
  if (!found) return ["Its accuracy was not estimated."];
  const share = (value) => `${value.toFixed(1)}\u00a0%`;
  const how = found.how === "held out" ? "measured" : "estimated";
  const lines = [];
  if (found.new !== null) lines.push(`Accuracy on these classes: ${share(found.new)} (${how} on ${plural(found.images, "photo")})`);
  if (found.old_then !== null) lines.push(`Accuracy on earlier classes: ${share(found.old_then)} when they were learnt${found.old_now === null ? "" : `, about ${share(found.old_now)} now`}`);
  lines.push(...found.mistakes.map((wrong) => `Confused: ${wrong.true} taken for ${wrong.predicted} (${plural(wrong.images, "photo")})`));
  return lines;
}

function finish(title, lines, wrong) {
  const list = make("ul");
  list.append(...lines.map((line) => make("li", line)));
  at("result").replaceChildren(make("h3", title), list);
  at("result").classList.toggle("error", wrong);
  at("result").hidden = false;
  at("job").hidden = true;
  at("result").focus();
  show();
}

// ------------------------------------------------------------------------------------------------------------ events

for (const id of ["choose", "folder", "camera"]) {
  at(id).addEventListener("change", (event) => {
    add([...event.target.files].sort((a, b) => a.webkitRelativePath.localeCompare(b.webkitRelativePath)));
    event.target.value = ""; // the same file may be chosen again
  });
}
addEventListener("paste", (event) => {
  if (event.clipboardData?.files.length) add([...event.clipboardData.files]);
});
for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
  addEventListener(kind, (event) => {
    event.preventDefault(); // a photo beside the field is not opened in the page's place
    at("drop").classList.toggle("over", kind === "dragenter" || kind === "dragover");
  });
}
addEventListener("drop", async (event) => {
  const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const files = [...event.dataTransfer.files];
  add(entries.length ? (await Promise.all(entries.map((entry) => filesBelow(entry)))).flat() : files);
});
at("filter").addEventListener("change", show);
at("csv").addEventListener("click", csv);
at("clear").addEventListener("click", () => {
  for (const { url, item } of pictures) { URL.revokeObjectURL(url); item.remove(); }
  [pictures, waiting, leftOut] = [[], [], 0];
  dropGroups();
  show();
});
at("all").addEventListener("submit", (event) => {
  event.preventDefault();
  label(shown(), at("all-class").value);
  at("all-class").value = "";
});
at("start").addEventListener("click", teach);
at("discover").addEventListener("click", () => discover(pictures.filter(isUnknown), model.limits));
setUpDiscovery(label);
setUpHistory({ model: () => model, changed: renew, busy: (yes) => { changing = yes; show(); } });
at("cancel").addEventListener("click", async () => {
  at("cancel").disabled = true;
  at("state").textContent = "Cancelling …";
  await request(`/v1/jobs/${learning.id}`, { method: "DELETE" }).catch(() => {});
});
addEventListener("beforeunload", (event) => {
  if (pictures.some(({ label: name }) => name)) event.preventDefault();
});
loadModel().catch((error) => { at("about").textContent = error.message; });
