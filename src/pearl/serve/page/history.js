// The tasks of a model, and what can be taken back: a lesson, the name of a class, a class, a task.
import { at, download, make, option, post } from "./server.js";

export function showHistory(model) {
  at("tasks").replaceChildren(...[...model.tasks].reverse().map(taskRow));
  at("one-class").replaceChildren(...model.classes.map((name) => option(name)));
  at("one-task").replaceChildren(...[...model.tasks].reverse().map(({ name }) => option(name)));
}

// While a lesson runs, or a change, nothing can be taken back.
export function allowChanges(model, busy) {
  at("undo").disabled = busy || model.tasks.length < 2;
  at("rename").disabled = busy || !model.classes.length;
  at("forget-class").disabled = busy || model.classes.length < 2;
  at("forget-task").disabled = busy || model.tasks.length < 2;
}

// `changed` is called after a change, and the buttons are disabled by `busy` meanwhile.
export function setUpHistory({ model, changed, busy }) {
  const change = async (title, path, body) => {
    try {
      const { line } = await post(path, { ...body, dry_run: true });
      if (!(await confirmed(title, line))) return;
      tell("Changing the model …");
      busy(true);
      const done = await post(path, body);
      await changed();
      tell(done.line);
    } catch (error) {
      tell(error.message, true);
    } finally {
      busy(false);
    }
  };
  const [name, task] = [() => at("one-class").value, () => at("one-task").value];
  at("undo").addEventListener("click", () => change("Undo the last lesson?", "/v1/undo", {}));
  at("rename-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const other = at("new-name").value.normalize("NFC").trim();
    at("new-name").value = "";
    change(`Rename ${name()} to ${other}?`, "/v1/rename", { old: name(), new: other });
  });
  at("forget-class").addEventListener("click", () => change(`Forget the class ${name()}?`, "/v1/forget", { class: name() }));
  at("forget-task").addEventListener("click", () => change(`Forget the task ${task()}?`, "/v1/forget", { task: task() }));
  at("export").addEventListener("click", () => exported(model().name, at("format").value));
  at("yes").addEventListener("click", () => at("confirm").close("yes"));
  at("no").addEventListener("click", () => at("confirm").close(""));
}

async function exported(name, to) {
  at("export").disabled = true;
  at("exported").classList.remove("error");
  at("exported").textContent = "Exporting …";
  try {
    await download(`/v1/export?to=${to}`, `${name}-${to}.zip`);
    at("exported").textContent = `Exported: ${name}-${to}.zip`;
  } catch (error) {
    at("exported").textContent = error.message;
    at("exported").classList.add("error");
  }
  at("export").disabled = false;
}

function confirmed(title, line) {
  const dialog = at("confirm");
  at("confirm-title").textContent = title;
  at("confirm-line").textContent = `${line[0].toUpperCase()}${line.slice(1)}.`;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true });
  });
}

function tell(line, wrong = false) {
  at("changed").textContent = line;
  at("changed").classList.toggle("error", wrong);
}

function taskRow(task) {
  const row = make("tr");
  const known = task.repeated_classes.length ? `more photos of ${task.repeated_classes.join(", ")}` : "";
  const date = task.learnt_at ? new Date(task.learnt_at).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : "–";
  const cells = [task.name, date, [task.classes.join(", "), known].filter(Boolean).join("; "), task.images ?? "–"];
  cells.push(task.mean_rank?.toFixed(1) ?? "–", task.accuracy === null ? "–" : `${task.accuracy.toFixed(1)}\u00a0%`);
  row.append(...cells.map((text) => make("td", text)));
  return row;
}
