// What all parts of the page use: elements, words, and requests to the server.
export const at = (id) => document.getElementById(id);
export const plural = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : what.endsWith("s") ? "es" : "s"}`;
export const make = (tag, text = "", kind = "") => Object.assign(document.createElement(tag), { textContent: text, className: kind });
export const option = (value, text = value) => Object.assign(make("option", text), { value });

export async function request(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("the server does not answer; see whether it still runs");
  }
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error ?? `the server answers ${answer.status}`);
  return body;
}

export const post = (path, value) => request(path, { method: "POST", body: JSON.stringify(value), headers: { "Content-Type": "application/json" } });

export function checkSize(photos, limits, verb) {
  const size = photos.reduce((sum, { file }) => sum + file.size, 0);
  if (photos.length > limits.photos || size > 0.99 * limits.bytes) {
    throw new Error(`at most ${plural(limits.photos, "photo")} and ${Math.floor(limits.bytes / 2 ** 20)} MiB are ${verb} at once; remove some`);
  }
}
