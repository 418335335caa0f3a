// The search over all pages: every word must occur in a section; if none has all, or many are asked
// for, those that have most come first. The index is loaded when the field is first used.

(() => {
  const folder = new URL(".", document.currentScript.src);
  const MOST = 20;
  const PASTED = 5; // words
  const SMALL = "a an the is are of in on to do does how much many what why when which i my if".split(" ");
  const place = document.querySelector(".search");
  const field = make("input", { type: "search", placeholder: "search all pages",
    "aria-label": "search all pages", "aria-controls": "found" });
  const count = make("p", { role: "status" });
  const found = make("ol", { id: "found" });
  const box = make("div", { class: "found", hidden: true }, count, found);
  place.append(field, box);

  let index;
  field.addEventListener("focus", load);
  field.addEventListener("input", search);
  document.addEventListener("keydown", (event) => {
    const writing = event.target.closest("input, textarea, select");
    if (event.key === "/" && !writing) {
      event.preventDefault();
      field.focus();
    }
  });
  place.addEventListener("keydown", (event) => {
    const stops = [field, ...found.querySelectorAll("a")];
    const at = stops.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
    if (stops[to]) {
      event.preventDefault();
      stops[to].focus();
    }
    if (event.key === "Escape") {
      box.hidden = true;
      field.focus();
    }
  });
  place.addEventListener("focusout", (event) => {
    if (event.relatedTarget && !place.contains(event.relatedTarget)) box.hidden = true;
  });

  function load() {
    index ??= new Promise((resolve, reject) => {
      const script = make("script", { src: new URL("search_index.js", folder) });
      script.onload = () => resolve(globalThis.searchIndex);
      script.onerror = () => reject(new Error("search_index.js is missing beside the pages"));
      document.head.append(script);
    });
    return index;
  }

  async function search() {
    const all = field.value.toLowerCase().replace(/[?!]/g, " ").split(/\s+/).filter(Boolean);
    const said = all.filter((word) => !SMALL.includes(word));
    const words = said.length ? said : all;
    box.hidden = !words.length;
    if (!words.length) return;
    let sections;
    try {
      sections = await load();
    } catch (error) {
      count.textContent = error.message;
      return;
    }
    const hits = sections
      .map((section) => ({ section, rank: rankOf(section, words) }))
      .filter((hit) => hit.rank > 0)
      .sort((a, b) => b.rank - a.rank);
    // Long text is a pasted message, whose words a long page may all have by chance.
    if (!hits.length || isPasted(words)) hits.splice(0, hits.length, ...closest(sections, words));
    const more = hits.length > MOST ? `, the first ${MOST} of them` : "";
    count.textContent = hits.length === 1 ? "1 section" : `${hits.length} sections${more}`;
    found.replaceChildren(...hits.slice(0, MOST).map((hit) => entry(hit.section, words)));
  }

  function isPasted(words) {
    return words.filter((word) => /[a-z0-9]/.test(word)).length >= PASTED;
  }

  // [address, page, heading, text, code]: a term of the glossary comes first, then headings; prose
  // counts more than code, and pages for those who change the course come last.
  function rankOf([address, page, heading, text, code], words) {
    const [heads, body] = [`${page} ${heading}`.toLowerCase(), text.toLowerCase()];
    const inCode = code.toLowerCase();
    let rank = /\.(py|sh|sbatch|env|txt|json)\.html/.test(address) ? 1 : 30;
    if (address.includes("/solutions/")) rank = 10;
    if (/CONTRIBUTING|changelog/.test(address)) rank = 1;
    const isTerm = address.includes("#term-");
    if (isTerm && heading.toLowerCase() === words.join(" ")) rank += 1000;
    for (const word of words) {
      const times = body.split(word).length - 1;
      const inHeads = (isTerm ? heading.toLowerCase() : heads).includes(word);
      if (!times && !inHeads && !inCode.includes(word)) return 0;
      rank += (inHeads ? (isTerm ? 200 : 100) : 0) + Math.min(times, 20);
    }
    return rank;
  }

  // The sections with most words of a pasted message, in which numbers and names often differ. A
  // rare word counts more than a frequent one, and a word of a heading more than one of a text.
  function closest(sections, words) {
    const asked = [...new Set(words.join(" ").match(/[a-z_]{2,}/g))];
    const rows = sections.map(([address, page, heading, text]) => ({
      section: [address, page, heading, text, ""],
      heads: wordsIn(heading),
      all: wordsIn(`${page} ${heading} ${text}`),
    }));
    const weights = new Map(asked.map((word) => {
      const having = rows.filter((row) => row.all.has(word)).length;
      return [word, having && Math.log(rows.length / having)];
    }));
    for (const row of rows) {
      row.rank = 0;
      for (const word of asked) {
        const times = (row.heads.has(word) ? 2 : 0) + (row.all.has(word) ? 1 : 0);
        row.rank += times * weights.get(word);
      }
      row.rank /= Math.sqrt(50 + row.all.size); // a long section has many words by chance
    }
    return rows.filter((row) => row.rank > 0).sort((a, b) => b.rank - a.rank).slice(0, MOST);
  }

  function wordsIn(text) {
    return new Set(text.toLowerCase().match(/[a-z_]{2,}/g));
  }

  function entry([address, page, heading, text], words) {
    const at = Math.max(0, text.toLowerCase().indexOf(words[0]));
    const start = at < 60 ? 0 : text.indexOf(" ", at - 60) + 1;
    const part = make("small", {}, start ? "… " : "");
    for (const piece of text.slice(start, start + 160).split(pattern(words))) {
      part.append(words.includes(piece.toLowerCase()) ? make("mark", {}, piece) : piece);
    }
    const name = heading && heading !== page ? `${page} › ${heading}` : page;
    return make("li", {}, make("a", { href: new URL(`../${address}`, folder) }, name), part);
  }

  function pattern(words) {
    const escaped = words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    return new RegExp(`(${escaped.join("|")})`, "gi");
  }
})();
