// Unknown photos in groups, shown as contact sheets: to be named, merged, split or dismissed.
import { at, checkSize, make, option, plural, request } from "./server.js";

let groups = []; // {title, photos, typical, doubtful, note, open}
let alike = new Map(); // a photo, and the name of one that is nearly the same
let made = 0; // groups that were made by splitting
let put = () => {}; // puts photos into the tray

export const isUnknown = ({ found, error, label }) => !error && !label && !!found?.[0].unknown;

// `label` puts photos into the tray with a name.
export function setUpDiscovery(label) {
  put = label;
}

export function dropGroups(line = "") {
  groups = [];
  draw(line);
}

export async function discover(photos, limits) {
  at("discover").disabled = true;
  at("groups-state").textContent = `Grouping ${plural(photos.length, "photo")} …`;
  try {
    checkSize(photos, limits, "grouped");
    const form = new FormData();
    for (const { file } of photos) form.append("images", file);
    const found = await request("/v1/discover", { method: "POST", body: form });
    const of = (numbers) => numbers.map((number) => photos[number]);
    groups = found.groups.map((group, number) => ({
      title: `Group ${number + 1}`,
      photos: of(group.photos),
      typical: of(group.typical),
      doubtful: of(group.doubtful),
      note: `The nearest known class is ${group.nearest}, which is probably wrong.`,
    }));
    if (found.alone.length) {
      groups.push({ title: "In no group", photos: of(found.alone), typical: [], doubtful: [], note: "Too few photos resemble these." });
    }
    alike = new Map(found.near_duplicates.map(([first, second]) => [photos[second], photos[first].name]));
    made = 0;
    const copies = found.duplicates.reduce((sum, same) => sum + same.length - 1, 0);
    draw([
      `${plural(found.groups.length, "group")} in ${plural(photos.length, "photo")}`,
      ...(copies ? [`${plural(copies, "duplicate")} left out`] : []),
      ...(found.known.length ? [`${found.known.length} of known classes`] : []),
    ].join("; "));
  } catch (error) {
    draw(error.message);
  }
  at("discover").disabled = false;
}

function draw(line) {
  at("groups-state").textContent = line;
  at("groups").replaceChildren(...groups.map(card));
}

// Shows the groups after one of them has changed; the keyboard continues at what has happened.
function changed(line) {
  groups = groups.filter(({ photos }) => photos.length);
  draw(line);
  at("groups-state").focus();
}

function card(group) {
  const item = at("group").content.firstElementChild.cloneNode(true);
  const part = (selector) => item.querySelector(selector);
  const others = groups.filter((other) => other !== group);
  part("h3").textContent = `${group.title}: ${plural(group.photos.length, "photo")}`;
  part(".note").textContent = group.note;
  const typical = group.typical.length ? [...group.typical, ...group.doubtful] : group.photos.slice(0, 12);
  const shown = group.open ? group.photos : typical;
  part(".sheet").replaceChildren(...shown.map((picture) => thumbnail(group, picture)));
  part(".sheet").setAttribute("aria-label", `Photos of ${group.title}`);
  part(".more").hidden = shown.length === group.photos.length;
  part(".more").textContent = `Show all ${plural(group.photos.length, "photo")}`;
  part(".more").addEventListener("click", () => { group.open = true; changed(`All photos of ${group.title} are shown`); });

  part("form input").setAttribute("aria-label", `Name of ${group.title}`);
  part("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const name = part("form input").value;
    const some = group.photos.filter(({ label }) => !label); // others were corrected meanwhile
    put(some, name);
    group.photos = [];
    changed(`${plural(some.length, "photo")} of ${group.title} put into the tray as ${name.trim()}`);
  });
  part(".dismiss").setAttribute("aria-label", `Dismiss ${group.title}`);
  part(".dismiss").addEventListener("click", () => { group.photos = []; changed(`${group.title} dismissed`); });

  const merge = part("select");
  merge.setAttribute("aria-label", `Merge ${group.title} with`);
  merge.append(option("", "Merge with …"), ...others.map(({ title }, number) => option(`${number}`, title)));
  merge.hidden = !others.length;
  merge.addEventListener("change", () => {
    const other = others[merge.value];
    for (const key of ["photos", "typical", "doubtful"]) other[key] = [...other[key], ...group[key]];
    group.photos = [];
    changed(`${group.title} merged with ${other.title}`);
  });

  const split = part(".split");
  const marked = () => group.photos.filter(({ marked: yes }) => yes);
  const count = () => {
    split.disabled = !marked().length || marked().length === group.photos.length;
    split.textContent = `Move ${marked().length ? plural(marked().length, "marked photo") : "marked photos"} to a new group`;
  };
  part(".sheet").addEventListener("change", count);
  count();
  split.addEventListener("click", () => {
    const some = marked();
    for (const picture of some) picture.marked = false;
    for (const key of ["photos", "typical", "doubtful"]) group[key] = group[key].filter((picture) => !some.includes(picture));
    made += 1;
    const title = `New group ${made}`;
    groups.splice(groups.indexOf(group) + 1, 0, { title, photos: some, typical: [], doubtful: [], note: `Taken from ${group.title}.` });
    changed(`${plural(some.length, "photo")} moved to ${title}`);
  });
  return item;
}

function thumbnail(group, picture) {
  const [item, label] = [make("li"), make("label")];
  const box = Object.assign(make("input"), { type: "checkbox", checked: !!picture.marked });
  box.addEventListener("change", () => { picture.marked = box.checked; });
  const image = Object.assign(make("img"), { src: picture.url, alt: "", loading: "lazy", decoding: "async" });
  const kind = group.typical.includes(picture) ? "typical: " : group.doubtful.includes(picture) ? "doubtful: " : "";
  const copy = alike.has(picture) ? `, nearly the same as ${alike.get(picture)}` : "";
  label.append(image, box, make("span", ` ${kind}${picture.name}${copy}`));
  item.append(label);
  return item;
}
