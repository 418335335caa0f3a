// The exercises in a page: the reader's code is run by the course's Python, and the notebook's own
// check answers. A puzzle asks for rows instead, which can be tapped together.

for (const place of document.querySelectorAll(".live-exercise")) {
  const given = JSON.parse(place.dataset.exercise);
  if (given.number) puzzle(place, given);
  else exercise(place, given);
}

function exercise(place, given) {
  const code = editor(given.stub, given.id);
  const result = results(given.call);
  const check = make("button", { type: "button" }, "check");
  check.addEventListener("click", async () => {
    const { lesson, call, setup } = given;
    const width = widthIn(place);
    await result.show(check, { do: "check", lesson, call, setup, code: code.value, width });
  });
  code.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) check.click();
  });
  const again = startAgain(() => code.put(given.stub));
  place.replaceChildren(code, make("div", { class: "live-buttons" }, check, again), result.element);
}

function puzzle(place, given) {
  const name = `Puzzle ${given.number}`;
  const result = results();
  const rows = given.stages.map((_, rank) => rowOf(rank));
  const code = editor(given.code, `${given.id} code`);
  const check = make("button", { type: "button" }, "check");
  const asCode = make("input", { type: "checkbox" });
  const link = make("a", {}, "link to these rows");
  const board = make("div", { class: "live-board", role: "group", "aria-label": `${name}, rows` },
    ...rows.map((row) => row.element));

  let solving; // a promise while Python is at work
  let onceMore = false; // the rows have changed meanwhile
  check.addEventListener("click", solve);
  asCode.addEventListener("change", () => switchTo(asCode.checked));
  const again = startAgain(() => {
    put(given.start);
    code.put(given.code);
    solve();
  });
  const empty = make("button", { type: "button" }, "empty all rows");
  empty.addEventListener("click", () => (put(given.stages.map(() => "")), solve()));
  const choice = make("label", {}, asCode, " write Python instead");
  place.replaceChildren(board, code, make("div", { class: "live-buttons" }, check, empty, again, choice, link),
    result.element);

  switchTo(given.asCode);
  const remembered = memory.read(given.id)?.split("\n");
  put(rowsOfLink() ?? (remembered?.length === rows.length ? remembered : given.start));
  if (rowsOfLink()) {
    switchTo(false);
    place.scrollIntoView();
    solve();
  }

  // Python starts before the first tap, and draws the empty board.
  const seen = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    solve();
  });
  seen.observe(place);

  function switchTo(wanted) {
    asCode.checked = wanted;
    board.hidden = wanted;
    empty.hidden = wanted;
    code.hidden = !wanted;
    link.hidden = wanted;
  }

  function put(texts) {
    texts.forEach((text, rank) => rows[rank].put(text));
    changed();
  }

  function changed() {
    const texts = rows.map((row) => row.text());
    memory.write(given.id, texts.join("\n"));
    link.href = `#${new URLSearchParams({ puzzle: given.number, rows: texts.join(";") })}`;
    rows.forEach((row) => row.offer());
  }

  // Rows may come from a link; code never does.
  function rowsOfLink() {
    const link = new URLSearchParams(location.hash.slice(1));
    const texts = (link.get("rows") ?? "").split(";");
    const fits = texts.length === rows.length && texts.every((text) => /^[\w,\s]{0,9999}$/.test(text));
    return Number(link.get("puzzle")) === given.number && fits ? texts : null;
  }

  function solve() {
    onceMore = true;
    solving ??= (async () => {
      while (onceMore) {
        onceMore = false;
        const question = { do: "solve", number: given.number, width: widthIn(place) };
        if (asCode.checked) Object.assign(question, { code: code.value, setup: given.setup });
        else question.rows = rows.map((row) => row.text());
        await result.show(check, question);
      }
    })().finally(() => (solving = undefined));
  }

  // The row of one rank: as text, and as buttons for the actions that may come next.
  function rowOf(rank) {
    const field = make("input", {
      type: "text", spellcheck: "false", autocomplete: "off", autocapitalize: "characters",
      "aria-label": `${name}, rank ${rank}`,
    });
    const buttons = make("div", { class: "live-actions" });
    field.addEventListener("input", () => (changed(), solve()));
    const cells = () => field.value.split(",").map((cell) => cell.trim()).filter(Boolean);

    function offer() {
      const written = cells();
      const next = [];
      for (const stage of given.stages[rank]) {
        for (const kind of given.kinds) {
          const free = (microbatch) => !written.includes(`${stage}${kind}${microbatch}`);
          const first = [...Array(given.microbatches).keys()].find(free);
          if (first !== undefined) next.push(`${stage}${kind}${first}`);
        }
      }
      buttons.replaceChildren(
        ...next.map((action) => button(action, `live-${action.match(/[A-Z]/)}`,
          () => [...written, action])),
        button("⌫", "", () => written.slice(0, -1), `take back the last action of rank ${rank}`),
      );
    }

    function button(text, kind, changedRow, words) {
      const made = make("button", { type: "button", class: kind,
        "aria-label": words ?? `rank ${rank}: ${text}` }, text);
      made.addEventListener("click", () => {
        const at = [...buttons.children].indexOf(made);
        field.value = changedRow().join(",");
        field.scrollLeft = field.scrollWidth;
        changed();
        solve();
        buttons.children[Math.min(at, buttons.children.length - 1)].focus(); // where it was
      });
      return made;
    }

    const element = make("div", { class: "live-row" },
      make("label", {}, make("span", {}, `rank ${rank}`), field), buttons);
    return { element, offer, put: (text) => (field.value = text), text: () => field.value };
  }
}

// The width of a drawing in its own units: a narrow one has letters of the same size.
function widthIn(place) {
  return place.clientWidth < 560 ? 400 : 820;
}

// A field for code that grows with it and remembers it on this machine.
function editor(start, id) {
  const field = make("textarea", { spellcheck: "false", autocapitalize: "off", autocomplete: "off",
    "aria-label": "your code" });
  const grow = () => (field.rows = field.value.split("\n").length + 1);
  field.put = (text) => {
    field.value = text;
    memory.write(id, text);
    grow();
  };
  field.addEventListener("input", () => field.put(field.value));
  field.put(memory.read(id) ?? start);
  return field;
}

function startAgain(action) {
  const button = make("button", { type: "button" }, "start again");
  button.addEventListener("click", action);
  return button;
}

// Where an answer is shown: what the check says, and of a finished schedule its drawing, why each
// bubble is there, and its name.
function results(call) {
  const said = make("pre", { class: "live-said", role: "status" });
  const name = make("p", { class: "live-name" });
  const picture = make("div", { class: "live-picture" });
  const reasons = make("div", { class: "live-reasons" });
  const element = make("div", { class: "live-result" }, said, name, picture, reasons);
  if (call) element.prepend(make("code", {}, call));

  async function show(button, question) {
    if (!said.textContent) said.textContent = "Python is starting ...";
    button.disabled = true;
    try {
      const answer = await python.ask(question);
      said.textContent = answer.said.trim();
      element.classList.toggle("right", answer.right);
      name.textContent = answer.name ?? "";
      picture.innerHTML = answer.svg ?? "";
      reasons.innerHTML = answer.reasons ?? "";
    } catch (error) {
      said.textContent = error.message;
    } finally {
      button.disabled = false;
    }
  }
  return { element, show };
}
