"""The HTML page that shows slides: one file, which needs no other file and no network."""

import html


def page_of(title, slides):
    """A whole page. `slides` are HTML texts, each a <section>."""
    return PAGE.replace("TITLE", html.escape(title)).replace("SECTIONS", "\n".join(slides))


def index_of(titles):
    """The page that lists the slides of all lessons. `titles` is {name of the file: its title}."""
    rows = "".join(
        f'<li><a href="{name}.html">{html.escape(title)}</a></li>' for name, title in titles.items()
    )
    return INDEX.replace("ROWS", rows)


INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Slides: pipeline parallelism</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 42rem; padding: 1rem; font: 18px/1.6 system-ui, Helvetica, sans-serif; }
li { margin: 6px 0; } ol { list-style: none; padding: 0; }
</style></head><body>
<h1>Slides of the lessons</h1>
<p>Arrow keys and space turn the page. n shows what to say, s shows it in a window of its own, and c
starts the minutes of an exercise. On a phone, a tap turns the page; a tap on the left turns back.</p>
<ol>ROWS</ol>
</body></html>
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
/* A dark page dims no block: words, axes and grounds change, the colours of actions stay. */
:root { color-scheme: light; --text: #1a1a1a; --page: #fff; --title: #0b5c8a; --quiet: #f2f4f6;
  --waiting: #d0d0d0; --drawn: #3a3a3a; --note: #fff8dc; }
@media screen and (prefers-color-scheme: dark) { :root { color-scheme: dark; --text: #e4e6e8;
  --page: #16191c; --title: #7cc4ee; --quiet: #22272b; --waiting: #404346; --drawn: #c3c8cd;
  --note: #33301f; } }
body { margin: 0; min-height: 100vh; display: grid; align-content: safe center; grid-template-columns: minmax(0, 1fr);
  background: var(--page); color: var(--text); font: 30px/1.35 Helvetica, Arial, sans-serif; }
section { display: none; box-sizing: border-box; width: 1280px; height: 720px; padding: 34px 56px 56px;
  overflow: hidden; position: relative; margin: 0 auto; transform-origin: top center; }
section.on { display: block; }
h1 { font-size: 64px; line-height: 1.15; margin: 90px 0 36px; color: var(--title); }
h2 { font-size: 42px; line-height: 1.15; margin: 0 0 20px; color: var(--title); }
p { margin: 0 0 22px; font-size: 32px; }
pre { font: 24px/1.3 Menlo, Consolas, "DejaVu Sans Mono", monospace; margin: 0; padding: 8px 4px; }
pre.code { background: var(--quiet); }
pre.output { border-left: 6px solid #009E73; background: var(--quiet); }
code { font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .9em; }
td code, th code { font-size: 24px; } table { border-collapse: collapse; font-size: 25px; } td, th { padding: 4px 14px; border-bottom: 1px solid #999; text-align: left; }
math { font-size: 36px; } math[display="block"] { font-size: 60px; } mfrac > * { padding: .14em 0; }
figure { margin: 0; text-align: center; } figure svg { overflow: visible; }
figcaption { font-size: 24.2px; margin-top: 6px; }
figcaption span { white-space: nowrap; margin: 0 5px; }
figcaption i { display: inline-block; width: 26px; height: 18px; margin-right: 8px; border: 1px solid #000; }
.number { position: absolute; right: 24px; bottom: 12px; font-size: 24px; opacity: .75; }
section:first-of-type .number::before { content: "arrow keys turn the page, n says more"; margin-right: 48px; }
@media (pointer: coarse) { section:first-of-type .number::before { content: "tap to turn the page"; } }
svg :is([fill="#3a3a3a"], [style*="fill: #3a3a3a"]) { fill: var(--drawn) !important; }
svg :is([stroke="#3a3a3a"], [style*="stroke: #3a3a3a"]) { stroke: var(--drawn) !important; }
.minutes { position: absolute; left: 64px; bottom: 30px; font-size: 30px; color: var(--title); }
.minutes b { font-size: 84px; font-variant-numeric: tabular-nums; margin-right: 18px; }
aside { display: none; }
#notes { position: fixed; left: 0; right: 0; bottom: 0; max-height: 45%; overflow: auto; display: none;
  padding: 16px 64px; background: var(--note); font-size: 24px; border-top: 3px solid #E69F00; }
@media print { @page { size: 1280px 720px; margin: 0; } #notes { display: none !important; }
  section { display: block; page-break-after: always; } }
</style></head><body>
SECTIONS
<div id="notes"></div>
<script>
// Arrow keys, Page keys and space turn the page. n: what to say, below the slide. s: the same in a
// window of its own, with the next title and a clock. c: start or stop the minutes of an exercise.
// On a phone, a tap turns the page: back on the left third of the screen, else on.
const slides = [...document.querySelectorAll("section")], notes = document.getElementById("notes");
const page = document.documentElement; // innerWidth of a phone counts what overflows
let at = 0, begun = Date.now(), speaker = null, counting = null;
const clock = seconds => Math.floor(Math.abs(seconds) / 60) + ":" + String(Math.floor(Math.abs(seconds) % 60)).padStart(2, "0");
slides.forEach((slide, i) => {
  const number = document.createElement("div");
  number.className = "number";
  number.textContent = (i + 1) + " / " + slides.length;
  slide.append(number);
});
function show(i) {
  slides[at].classList.remove("on");
  at = Math.max(0, Math.min(slides.length - 1, i));
  slides[at].classList.add("on");
  slides[at].style.zoom = Math.min(page.clientWidth / 1280, page.clientHeight / 720);
  history.replaceState(null, "", "#" + (at + 1));
  tell();
}
function tell() {
  const aside = slides[at].querySelector("aside"), next = slides[at + 1];
  notes.innerHTML = aside ? aside.innerHTML : "";
  if (!speaker || speaker.closed) return;
  const planned = slides[at].dataset.begins;
  speaker.document.body.innerHTML = "<h3>" + (at + 1) + " / " + slides.length + "&emsp;since the start " +
    clock((Date.now() - begun) / 1000) + (planned ? "&emsp;planned " + planned + ":00" : "") + "</h3>" +
    notes.innerHTML + (next ? "<p><b>Next:</b> " + next.querySelector("h1, h2").innerHTML + "</p>" : "");
}
function count() {
  const big = slides[at].querySelector(".minutes b");
  if (counting) { clearInterval(counting.timer); counting = null; return; }
  if (!big) return;
  counting = { ends: Date.now() + 60000 * big.dataset.minutes };
  const tick = () => { const left = (counting.ends - Date.now()) / 1000; big.textContent = (left < 0 ? "+" : "") + clock(left); };
  counting.timer = setInterval(tick, 250);
  tick();
}
addEventListener("keydown", e => {
  if (["ArrowRight", "ArrowDown", "PageDown", " "].includes(e.key)) show(at + 1);
  if (["ArrowLeft", "ArrowUp", "PageUp"].includes(e.key)) show(at - 1);
  if (e.key === "Home") show(0);
  if (e.key === "End") show(slides.length - 1);
  if (e.key === "n") notes.style.display = notes.style.display === "block" ? "none" : "block";
  if (e.key === "c") count();
  if (e.key === "s") {
    if (!speaker) begun = Date.now();
    speaker = open("", "speaker", "width=900,height=700");
    speaker.document.head.innerHTML = "<style>body { font: 22px/1.4 sans-serif; margin: 24px }</style>";
    tell();
  }
});
addEventListener("pointerup", e => {
  if (e.pointerType === "touch") show(e.clientX < page.clientWidth / 3 ? at - 1 : at + 1);
});
setInterval(tell, 1000);
addEventListener("resize", () => show(at));
show((parseInt(location.hash.slice(1)) || 1) - 1);
</script></body></html>
"""
