// The explorer in a page. Every <div class="live-explorer"> has what it offers and where it starts in
// data-offer, and a picture drawn when the page was made. Python draws all others.

const STORY = "Point at a block, or tap it: this line says what it is and why it starts then.";

for (const place of document.querySelectorAll(".live-explorer")) explorer(place);

function explorer(place) {
  const offer = JSON.parse(place.dataset.offer);
  const state = { ...offer.start, at: 0, path: false, table: false };
  const parts = build(place, offer);
  let shown; // the answer on the screen
  let playing;

  const controls = { ...parts.selects, ...parts.sliders, rows: parts.rows };
  for (const [name, control] of Object.entries(controls)) {
    control.addEventListener("input", () => {
      state[name] = parts.sliders[name] ? Number(control.value) : control.value;
      if (offer.axes.includes(name)) state.moved = name;
      tidy();
      keepInSight();
      refresh();
    });
  }
  for (const name of ["path", "table"]) {
    parts[name].addEventListener("change", () => {
      state[name] = parts[name].checked;
      refresh();
    });
  }
  parts.cursor.addEventListener("input", async () => {
    if (!shown) await refresh();
    if (shown.times) moveTo(shown.times[Math.min(parts.cursor.value, shown.times.length - 1)]);
  });
  parts.back.addEventListener("click", () => step(-1));
  parts.on.addEventListener("click", () => step(1));
  parts.play.addEventListener("click", () => (playing ? stop() : play()));
  parts.picture.addEventListener("pointermove", (event) => pointAt(event, false));
  parts.picture.addEventListener("click", (event) => pointAt(event, true));

  parts.more.addEventListener("toggle", () => {
    if (parts.more.open && offer.axes.length && !parts.curves.innerHTML) refresh();
  });

  // A narrow drawing has letters of the same size.
  const width = () => (parts.picture.clientWidth < 560 ? 400 : 820);

  // One question at a time; of the settings chosen meanwhile only the last counts.
  let refreshing;
  let again = false;
  function refresh() {
    again = true;
    refreshing ??= (async () => {
      while (again) {
        again = false;
        await redraw();
      }
    })().finally(() => (refreshing = undefined));
    return refreshing;
  }

  async function redraw() {
    if (!shown) parts.status.textContent = "Python is starting ...";
    try {
      shown = await python.ask({
        do: "explore",
        settings: settingsOf(state),
        longest_path: state.path,
        table: state.table,
        width: width(),
      });
    } catch (error) {
      parts.status.textContent = error.message;
      return;
    }
    parts.status.textContent = shown.refusal;
    place.classList.toggle("refused", Boolean(shown.refusal));
    for (const [name, slider] of Object.entries(parts.sliders)) {
      slider.disabled = shown.disabled.includes(name);
    }
    keepPosition(); // now, so that the link never leads to an older picture than the one beside it
    if (!shown.refusal) {
      parts.view.classList.remove("stored");
      parts.drawing.innerHTML = shown.svg;
      parts.held.innerHTML = shown.held;
      keepInSight();
      parts.figures.innerHTML = shown.figures;
      parts.actions.innerHTML = shown.table;
      parts.reasons.innerHTML = shown.reasons;
      parts.cursor.max = shown.times.length - 1;
      await moveTo(state.at);
    }
    if (offer.axes.length && parts.more.open) await showMemoryAndTime();
  }

  // What changes is wholly in sight, and so is the slider that changes it.
  function keepInSight() {
    const active = document.activeElement;
    if (!parts.more.parentElement.contains(active) || parts.time.contains(active)) return;
    parts.view.scrollIntoView({ block: "nearest" });
    active.scrollIntoView({ block: "nearest" });
  }

  // Computes curve by curve, and shows them when all are there; moving a control stops this.
  async function showMemoryAndTime() {
    for (let lines = 1, complete = false; !complete && !again; lines++) {
      const settings = settingsOf(state);
      const answer = await python.ask({ do: "memory_and_time", settings, lines });
      parts.verdict.innerHTML = answer.verdict;
      if (!parts.curves.innerHTML || answer.complete) {
        const open = parts.curves.querySelector("details")?.open;
        parts.curves.innerHTML = answer.svg + answer.table;
        if (open) parts.curves.querySelector("details").open = true;
      }
      complete = answer.complete;
    }
  }

  let moving;
  async function moveTo(time) {
    state.at = time;
    if (moving) return; // the one under way goes on to the newest time
    moving = true;
    try {
      let answer;
      do {
        time = state.at;
        answer = await python.ask({ do: "moment", settings: settingsOf(state), time, width: width() });
      } while (time !== state.at);
      parts.line.innerHTML = answer.svg;
      parts.moment.innerHTML = answer.html;
      parts.now.textContent = answer.now;
      parts.cursor.value = Math.max(0, shown.times.findLastIndex((each) => each <= time + 1e-9));
      parts.cursor.setAttribute("aria-valuetext", answer.now);
    } finally {
      moving = false;
    }
    keepPosition();
  }

  async function step(by) {
    if (!shown) await refresh();
    const at = Number(parts.cursor.value) + by;
    if (shown.times?.[at] !== undefined) await moveTo(shown.times[at]);
    return shown.times?.[at + 1] !== undefined;
  }

  async function play() {
    parts.play.textContent = "stop";
    playing = setInterval(async () => (await step(1)) || stop(), 400);
  }

  function stop() {
    clearInterval(playing);
    playing = undefined;
    parts.play.textContent = "play";
  }

  // The story of the block under the pointer; a click or a tap moves the cursor there.
  let pointing = false;
  async function pointAt(event, goThere) {
    const svg = parts.drawing.querySelector("svg");
    if (!svg || shown?.refusal || (pointing && !goThere)) return;
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(
      svg.getScreenCTM().inverse(),
    );
    pointing = true;
    try {
      if (!shown && !goThere) return; // a mouse that only passes by starts nothing
      if (!shown) await refresh();
      const told = await python.ask({ do: "point", settings: settingsOf(state), x, y, width: width() });
      parts.story.textContent = told.story.join("; ") || STORY;
      if (goThere && told.time !== null) await moveTo(told.time);
    } finally {
      pointing = false;
    }
  }

  // The controls show the state; rows are asked for where they count.
  function tidy() {
    for (const [name, control] of Object.entries(controls)) control.value = state[name];
    for (const [name, slider] of Object.entries(parts.sliders)) {
      slider.nextElementSibling.textContent = state[name];
    }
    for (const name of ["path", "table"]) parts[name].checked = state[name];
    parts.rows.parentElement.hidden = state.schedule !== offer.own;
    if (parts.folded.some((name) => state[name] !== offer.defaults[name])) parts.more.open = true;
  }

  function keepPosition() {
    const position = new URLSearchParams(Object.entries(state).filter(
      ([name, value]) => value !== offer.defaults[name] && value !== false && value !== "",
    ));
    const address = `${offer.page}#${position}`;
    parts.link.href = address;
    if (offer.whole) history.replaceState(null, "", `#${position}`);
  }

  // Only known names, and only values that the controls can have, are taken from a link.
  function takePosition() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const [name, start] of Object.entries({ ...offer.start, at: 0 })) {
      state[name] = acceptable(name, given.get(name), start);
    }
    state.path = given.get("path") === "true";
    state.table = given.get("table") === "true";
  }

  function acceptable(name, text, otherwise) {
    if (text === null) return otherwise;
    if (offer.choices[name]) return offer.choices[name].includes(text) ? text : otherwise;
    if (name === "rows") return /^[\w,();\s]{0,40000}$/.test(text) ? text : otherwise;
    if (name === "moved") return offer.axes.includes(text) ? text : otherwise;
    const number = Number(text);
    if (text === "" || !Number.isFinite(number)) return otherwise;
    if (name === "at") return Math.max(0, number);
    const [, least, most, unit] = offer.sliders[name];
    const units = Math.round(Math.min(most, Math.max(least, number)) / unit);
    return Number((units * unit).toFixed(6));
  }

  function settingsOf({ at, path, table, ...settings }) {
    return settings;
  }

  if (offer.whole) {
    addEventListener("hashchange", () => (takePosition(), tidy(), refresh()));
    takePosition();
    refresh();
  }
  if (offer.axes.length && !offer.whole) parts.more.open = true; // a lesson speaks of the curves
  tidy();
  keepPosition();
}

// All elements of an explorer; what is in the place already becomes the first drawing. The picture is
// next to the controls and stays in sight; costs and sizes are folded below it.
function build(place, offer) {
  const drawing = make("div", { class: "live-drawing" }, ...place.childNodes);
  const line = make("div", { class: "live-line" });
  const picture = make("div", { class: "live-picture" }, make("div", {}, drawing, line));
  const parts = { drawing, line, picture, selects: {}, sliders: {} };
  const first = make("div", { class: "live-choices live-first" });
  const costs = make("div", { class: "live-choices" });
  for (const [name, words, where] of [
    ["schedule", "schedule", first],
    ["compare", "compare with", first],
    ["work", "work of micro-batches", costs],
  ]) {
    const options = offer.choices[name].map((each) => make("option", {}, each));
    parts.selects[name] = make("select", { "aria-label": words }, ...options);
    where.append(make("label", {}, make("span", {}, words), parts.selects[name]));
  }
  const sizes = ["ranks", "microbatches"];
  for (const [name, [words, min, max, step]] of Object.entries(offer.sliders)) {
    parts.sliders[name] = make("input", { type: "range", min, max, step, "aria-label": words });
    (sizes.includes(name) ? first : costs).append(
      make("label", {}, make("span", {}, words), parts.sliders[name], make("output")),
    );
  }
  parts.folded = ["work", ...Object.keys(offer.sliders)].filter((name) => !sizes.includes(name));
  parts.rows = make("textarea", { rows: 5, spellcheck: "false", autocapitalize: "characters" });
  const rows = make("label", { class: "live-rows" }, "one row per rank, such as 0F0,0F1,0B0,0B1",
    parts.rows);
  for (const name of [
    "status", "held", "figures", "reasons", "moment", "now", "story", "verdict", "curves",
  ]) {
    parts[name] = make("div", { class: `live-${name}` });
  }
  parts.actions = make("div", { class: "live-actions-table" });
  parts.status.setAttribute("role", "status");
  parts.now.setAttribute("aria-live", "polite");
  parts.verdict.setAttribute("aria-live", "polite");
  parts.story.textContent = STORY;
  parts.path = make("input", { type: "checkbox" });
  parts.table = make("input", { type: "checkbox" });
  parts.link = make("a", {}, offer.whole ? "link to this position" : "open in the explorer");
  const shown = make("div", { class: "live-shown" },
    make("label", {}, parts.path, " longest path and bubbles"),
    make("label", {}, parts.table, " table of all actions"), parts.link);
  parts.play = make("button", { type: "button" }, "play");
  parts.back = make("button", { type: "button" }, "step back");
  parts.on = make("button", { type: "button" }, "step on");
  parts.cursor = make("input", { type: "range", min: 0, max: 1, value: 0, "aria-label": "cursor" });
  const time = make("div", { class: "live-time" }, parts.play, parts.back, parts.on, parts.cursor,
    parts.now);
  parts.time = time;
  picture.append(parts.held);
  parts.view = make("div", { class: "live-view stored" }, parts.status, picture);
  parts.more = make("details", { class: "live-more" },
    make("summary", {}, offer.axes.length ? "costs and memory" : "costs"), costs, parts.verdict,
    parts.curves);
  const work = make("div", { class: "live-work" }, first, rows, parts.view, time, parts.story, shown,
    parts.more);
  place.replaceChildren(work, parts.figures, parts.moment, parts.reasons, parts.actions);
  return parts;
}
