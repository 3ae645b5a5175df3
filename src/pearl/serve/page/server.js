// What all parts of the page use: elements, words, and requests to the server.
export const at = (id) => document.getElementById(id);
export const plural = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : what.endsWith("s") ? "es" : "s"}`;
export const make = (tag, text = "", kind = "") => Object.assign(document.createElement(tag), { textContent: text, className: kind });
export const option = (value, text = value) => Object.assign(make("option", text), { value });

export async function request(path, options = {}) {
  const answer = await fetched(path, options);
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error ?? `the server answers ${answer.status}`);
  return body;
}

// A file that the server makes.
export async function download(path, name) {
  const answer = await fetched(path);
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `the server answers ${answer.status}`);
  save(await answer.blob(), name);
}

// Offers a file to be saved.
export function save(blob, name) {
  const link = Object.assign(make("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function fetched(path, options = {}) {
  try {
    return await fetch(path, options);
  } catch {
    throw new Error("the server does not answer; see whether it still runs");
  }
}

export const post = (path, value) => request(path, { method: "POST", body: JSON.stringify(value), headers: { "Content-Type": "application/json" } });

export function checkSize(photos, limits, verb) {
  const size = photos.reduce((sum, { file }) => sum + file.size, 0);
  if (photos.length > limits.photos || size > 0.99 * limits.bytes) {
    throw new Error(`at most ${plural(limits.photos, "photo")} and ${Math.floor(limits.bytes / 2 ** 20)} MiB are ${verb} at once; remove some`);
  }
}
