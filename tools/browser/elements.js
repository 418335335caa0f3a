// What the other scripts of a page share.

// An element with attributes and children, as in make("p", {class: "place"}, "rank 0").
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// What the page remembers of a reader on this machine, if the browser allows it.
const memory = {
  read(name) {
    try {
      return localStorage.getItem(`${location.pathname} ${name}`);
    } catch {
      return null;
    }
  },
  write(name, text) {
    try {
      localStorage.setItem(`${location.pathname} ${name}`, text);
    } catch {
      // A private window: it is forgotten with the page.
    }
  },
};

// On a wide screen the list of all pages scrolls by itself: the page that is open is in view.
addEventListener("DOMContentLoaded", () => {
  const nav = document.getElementById("ways");
  const here = nav?.querySelector("[aria-current]");
  if (here) nav.scrollTop = here.offsetTop - nav.offsetTop - nav.clientHeight / 2;
});
