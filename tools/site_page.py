"""The HTML around every page of the website: head, header, contents, the way to all other pages."""

import html
import re
from functools import cache

from pygments.formatters import HtmlFormatter

DESCRIPTION = (
    "A course on pipeline parallelism in PyTorch: predict a schedule, perform it with real "
    "processes, compare. Explorer and puzzles run in the browser."
)
PREVIEW = "images/preview.png"  # of a link to the site; tools/preview_picture.py draws it
FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#56B4E9" '
    'd="M0 1h6v4H0zM5 6h6v4H5z"/><path fill="#009E73" d="M7 1h9v4H7zM10 11h6v4h-6z"/></svg>'
)
GREY = "#767676"  # of the words of a drawing, lab.drawing.TEXT
LONG = 5  # headings of a page that gets a list of contents


@cache
def style():
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{STYLE}"


def with_words_of_the_page(svg):
    """A drawing that a page shows as a picture, with its words in the page's colour, light or dark.

    The drawings' own grey can be read on white and on black; a dark page is neither.
    """
    light, dark = re.findall(r"--text: (#\w{6});", STYLE)
    words = f'text:is([fill="{GREY}"], [style*="{GREY}"])'
    style = f"""<style>{words} {{ fill: {light} !important; }}
@media (prefers-color-scheme: dark) {{ {words} {{ fill: {dark} !important; }} }}</style></svg>"""
    before, _, after = svg.rpartition("</svg>")
    return f"{before}{style}{after}"


def contents_of(body):
    """A list of links to the headings of a long page, as HTML; "" for a short page."""
    heads = re.findall(r'<h2 id="([^"]*)">(.*?)(?:<a class="anchor-link".*?)?</h2>', body, re.S)
    if len(heads) < LONG:
        return ""
    rows = "".join(f'<li><a href="#{anchor}">{words}</a></li>' for anchor, words in heads)
    return (
        f'<details class="contents"><summary>On this page</summary><ol>{rows}</ol></details>'
        '<div class="top"><a href="#top">to the top</a></div>'
    )


def with_contents(body):
    """The body of a page with its list of contents below the first heading."""
    contents = contents_of(body)
    before, end, after = body.partition("</h1>")
    return f"{before}{end}{contents}{after}" if end else contents + body


def head_of(title, above, address, site):
    """What a browser's tab, a search engine and the preview of a link show of a page.

    `site` is the address of the whole site, "" if it is not known; `above` leads to its top.
    """
    title = html.escape(title)
    tags = {
        "og:title": title,
        "og:description": DESCRIPTION,
        "og:type": "website",
        "og:image": f"{site or above}{PREVIEW}",
        "og:image:alt": "GPipe above 1F1B: equal bubble, less memory",
    }
    if site:
        tags["og:url"] = f"{site}{address}"
    metas = "".join(f'<meta property="{name}" content="{text}">' for name, text in tags.items())
    return (
        f'<title>{title}</title><meta name="description" content="{DESCRIPTION}">{metas}'
        '<meta name="twitter:card" content="summary_large_image">'
        f'<link rel="icon" type="image/svg+xml" href="{above}favicon.svg">'
    )


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; connect-src 'none';
 img-src 'self' file: data:; style-src 'self' file: 'unsafe-inline';
 script-src 'self' file: blob: data: 'wasm-unsafe-eval'; worker-src blob: data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
{head}
<style>{style}</style><link rel="stylesheet" href="{above}/live.css">{scripts}</head><body id="top">
<header><b>{home}</b> <a class="ways" href="#ways">all pages</a><div class="search"></div></header>
<main><p class="place">{here}</p>{body}<p class="turn">{turn}</p></main>
<nav id="ways" aria-label="all pages">{ways}</nav>
</body></html>
"""

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #ffffff; --quiet: #f2f4f6; --line: #d0d4d8;
  --link: #0b5c8a; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e6e8; --page: #16191c; --quiet: #22272b; --line: #454b50; --link: #7cc4ee; } }
body { margin: 0; position: relative; --ground: var(--page); background: var(--page); color: var(--text); display: grid;
  grid: auto 1fr / 270px minmax(0, 1fr); font: 17px/1.6 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
header { padding: 22px 20px 0; font-size: 15px; line-height: 1.4; } header a { text-decoration: none; }
header, nav { border-right: 1px solid var(--line); }
header .ways { display: none; }
main { overflow-wrap: break-word; grid-area: 1 / 2 / span 2; max-width: 980px; padding: 12px 44px 80px; }
nav { grid-area: 2 / 1; box-sizing: border-box; max-height: 100vh; overflow: auto; position: sticky;
  top: 0; padding: 0 20px 22px; font-size: 15px; line-height: 1.4; }
nav h2 { font-size: 15px; margin: 1.4em 0 0; } nav ol { list-style: none; padding: 0; margin: 0; }
nav li { margin: 7px 0; } nav a { text-decoration: none; }
nav [aria-current] { font-weight: bold; color: var(--text); }
.place { font-size: 14px; margin: 8px 0 0; } .place:empty, .turn:empty { display: none; }
.turn { display: flex; flex-wrap: wrap; gap: 8px 24px; justify-content: space-between;
  border-top: 1px solid var(--line); margin-top: 48px; padding-top: 14px; }
.panel { font-size: 15px; font-style: italic; margin: 0; }
a { color: var(--link); } a.anchor-link { visibility: hidden; padding-left: .3em; }
:is(h1, h2, h3):hover a.anchor-link { visibility: visible; }
h1, h2, h3 { line-height: 1.25; margin: 1.6em 0 .5em; } h1 { margin-top: .6em; }
pre, code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { font-size: 14px; line-height: 1.45; overflow-x: auto; margin: 0; padding: 10px 14px;
  --ground: var(--quiet); background: var(--ground); border-radius: 6px; }
code { font-size: .9em; } pre code { font-size: inherit; }
.highlight { background: var(--quiet) !important; border-radius: 6px; margin: 10px 0; }
.output_wrapper pre, .output pre { border-left: 4px solid #009E73; border-radius: 0;
  --ground: var(--page); }
.output .highlight pre { border-left: 0; --ground: var(--quiet); }
.output_svg, .output_html, p:has(> math) { overflow-x: auto; }
.prompt { display: none; }
mfrac > * { padding: .14em 0; } /* or letters touch the bar */
svg, img { max-width: 100%; height: auto; }
img[src*="gpipe-above"] { max-height: 50vh; } /* so that both timelines are on the first screen */
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 15px; margin: 14px 0; }
td, th { padding: 5px 12px; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
@media (max-width: 800px) { body { display: block; }
  header { display: flex; gap: 16px; justify-content: space-between; padding: 12px 18px; border: 0;
    border-bottom: 1px solid var(--line); }
  header .ways { display: inline; white-space: nowrap; }
  header b { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
  main { padding: 8px 18px 40px; } h1 { font-size: 26px; }
  p > img:is([src*="gpipe-above"], [src*="map-of"], [src*="the-same"]) { min-width: 0 !important; }
  /* What is wide keeps a width at which it can be read, and scrolls. */
  .wide, p:has(> img) { overflow-x: auto; }
  /* A shadow at an edge says that it goes on there; the covers in front of it scroll along. */
  .wide, p:has(> img), .output_html, pre { background:
    linear-gradient(90deg, var(--ground) 30%, transparent) 0 / 40px 100% no-repeat local,
    linear-gradient(-90deg, var(--ground) 30%, transparent) 100% / 40px 100% no-repeat local,
    linear-gradient(90deg, #888a, transparent) 0 / 12px 100% no-repeat scroll,
    linear-gradient(-90deg, #888a, transparent) 100% / 12px 100% no-repeat scroll var(--ground); }
  .output svg, .wide > *, p > img { min-width: 620px; }
  .wide > table { display: table; min-width: 760px; }
  nav { max-height: none; position: static; border: 0; border-top: 1px solid var(--line); } }
@media (min-width: 801px) { .output pre { white-space: pre-wrap; } }
:is(.contents, .folded) { font-size: 15px; margin: 10px 0; }
:is(.contents, .folded) summary { cursor: pointer; color: var(--link); }
.contents ol { margin: 6px 0; padding-left: 24px; columns: 2; }
/* It is in sight from the second screen on, so that it never covers what a visitor sees first. */
.top { position: absolute; top: min(200vh, 100% - 44px); bottom: 0; right: 14px; z-index: 3;
  pointer-events: none; }
.top a { display: block; position: sticky; top: calc(100vh - 44px); pointer-events: auto; padding: 3px 10px;
  font-size: 14px; background: var(--page); border: 1px solid var(--line); border-radius: 6px;
  text-decoration: none; }
.doors { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px;
  margin: 18px 0; }
.doors a { border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; font-size: 15px;
  text-decoration: none; color: var(--text); background: var(--quiet); }
.doors a:hover { border-color: var(--link); }
.doors b { display: block; font-size: 18px; color: var(--link); }
/* The drawings' grey is for black and for white; as a part of a page they take its colours. */
svg text:is([fill="#767676"], [style*="#767676"]) { fill: var(--text) !important; }
@media (max-width: 800px) { .contents ol { columns: 1; } }
@media print { header, nav, .place, .turn, .top, .contents, .live-buttons { display: none; }
  body { display: block; } main { max-width: none; padding: 0; }
  pre { white-space: pre-wrap !important; overflow-wrap: anywhere; }
  pre, .wide, table, .output_svg, .output_html, .live-picture { overflow: visible !important; }
  table { display: table; } td, th { overflow-wrap: anywhere; }
  .output svg, .wide > *, p > img, .live-picture > * { min-width: 0 !important; }
  .folded::details-content { display: block; content-visibility: visible; }
  svg, img, tr { break-inside: avoid; } }
"""
